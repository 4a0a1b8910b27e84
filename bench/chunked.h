/* An incremental decoder of HTTP/1.1 chunked bodies (RFC 9112 7.1): gives the payload's spans to a sink. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum chunked_state { CHUNK_SIZE, CHUNK_EXTENSION, CHUNK_DATA, CHUNK_END, TRAILER, ENDED };
struct chunked { enum chunked_state state; uint64_t left; int in_line; };
typedef void (*sink)(void *owner, const char *bytes, size_t size);

static inline int hexadecimal(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c |= 32;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Feed bytes; returns how many belong to this body. It is whole when the state is ENDED. */
static inline size_t chunked_feed(struct chunked *c, const char *bytes, size_t size, sink take, void *owner) {
  size_t at = 0;
  while (at < size && c->state != ENDED) {
    if (c->state == CHUNK_DATA) {
      size_t span = size - at < c->left ? size - at : c->left;
      take(owner, bytes + at, span);
      at += span;
      if (!(c->left -= span)) c->state = CHUNK_END;
      continue;
    }
    char byte = bytes[at++];
    switch (c->state) {
    case CHUNK_SIZE:
      if (hexadecimal(byte) >= 0) { c->left = c->left * 16 + hexadecimal(byte); break; }
      if (byte != '\n') { if (byte != '\r') c->state = CHUNK_EXTENSION; break; }
      /* fall through */
    case CHUNK_EXTENSION:
      if (byte == '\n') { c->state = c->left ? CHUNK_DATA : TRAILER; c->in_line = 0; }
      break;
    case CHUNK_END:
      if (byte == '\n') { c->state = CHUNK_SIZE; c->left = 0; }
      break;
    default:                                          /* trailer fields, until an empty line */
      if (byte == '\n') { if (!c->in_line) c->state = ENDED; c->in_line = 0; }
      else if (byte != '\r') c->in_line = 1;
    }
  }
  return at;
}
