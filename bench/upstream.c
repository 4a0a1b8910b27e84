/* A fake vLLM that is faster than any gateway: one epoll thread on loopback.          upstream PORT
 *
 *   GET /health, GET /v1/models (`fake` and `fake@50`), POST /v1/chat/completions.
 *
 * A stream has `max_tokens` (200) chunks: a role chunk, the first fifth as reasoning, the rest as content, finish, usage
 * where include_usage is true, [DONE]; each is an HTTP chunk and a send() of its own, as uvicorn's are. `fake@R` paces a
 * stream at R tokens a second; `fake` goes as fast as the socket takes it. The text of a token is " w@" and 16 digits:
 * CLOCK_MONOTONIC in microseconds, so that the load generator knows how long a chunk was on its way; or, where the
 * request has a `seed`, the seed and the token's number, so that two answers to one request are the same bytes. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "chunked.h"

#define ROOM 65536                                    /* bytes: of a head, and of what is kept of a body's two ends */
#define MOST 16384                                    /* streams at once */
#define FREE (-1)
#define HTTP_OK "HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 15:00:00 GMT\r\nserver: uvicorn\r\n"
#define EVENTS HTTP_OK "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
#define CHUNK "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\"," \
              "\"created\":1764430000,\"model\":\"fake\",\"choices\":["
#define TOKEN(field) "data: " CHUNK "{\"index\":0,\"delta\":{\"" field "\":\" w@0000000000000000\"},\"logprobs\":null," \
                     "\"finish_reason\":null,\"token_ids\":null}]}\n\n"
#define MODEL(id) "{\"id\":\"" id "\",\"object\":\"model\",\"created\":1764430000,\"owned_by\":\"vllm\",\"root\":\"" id \
                  "\",\"parent\":null,\"max_model_len\":32768}"

enum state { HEAD, BODY, STREAMING };
enum route { NOWHERE, HEALTH, MODELS, CHAT };

struct client {
  int fd, waits_to_write, closes;
  enum state state;
  enum route route;
  char *in; size_t in_size;                           /* what has come and is not used yet */
  char *body; size_t body_size;                       /* the first ROOM bytes of the body */
  char *tail; size_t tail_size;                       /* its last ROOM bytes, if it is longer */
  int64_t left; int is_chunked; struct chunked chunked;
  int sent, tokens, thoughts, usage; long long seed;  /* of the stream */
  uint64_t interval, due; int place, turn;            /* ns; the place in the heap of paced ones, or in the ring */
  char pending[2048]; int pending_size;               /* what the socket did not take */
};

static int epoll, paced_count, fast_count;
static struct client *paced[MOST], *fast[MOST];       /* a heap by due; those that go as fast as they can */

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

/* ---- who is to send next */

static void put(int place, struct client *c) { paced[place] = c; c->place = place; }

static void rise(int place) {
  struct client *c = paced[place];
  for (; place && paced[(place - 1) / 2]->due > c->due; place = (place - 1) / 2) put(place, paced[(place - 1) / 2]);
  put(place, c);
}

static void sink_down(int place) {
  struct client *c = paced[place];
  for (int next; (next = 2 * place + 1) < paced_count; place = next) {
    if (next + 1 < paced_count && paced[next + 1]->due < paced[next]->due) next++;
    if (paced[next]->due >= c->due) break;
    put(place, paced[next]);
  }
  put(place, c);
}

static void pace(struct client *c) { put(paced_count, c); rise(paced_count++); }
static void hurry(struct client *c) { fast[c->turn = fast_count++] = c; }

static void rest(struct client *c) {
  if (c->place != FREE) {
    int place = c->place;
    struct client *last = paced[--paced_count];
    if (last != c) { put(place, last); rise(place); sink_down(last->place); }
  }
  if (c->turn != FREE) (fast[c->turn] = fast[--fast_count])->turn = c->turn;
  c->place = c->turn = FREE;
}

static void leave(struct client *c) {
  rest(c);
  close(c->fd);
  free(c->in), free(c->body), free(c->tail), free(c);
}

/* ---- writing */

static void watch(struct client *c, int writing) {
  struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.ptr = c};
  if (c->waits_to_write != writing) epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event);
  c->waits_to_write = writing;
}

/* 1: sent, 0: the socket is full and the rest is pending, -1: the client has gone */
static int give(struct client *c, const char *bytes, int size) {
  ssize_t sent = send(c->fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent == size) return 1;
  if (sent < 0 && errno != EAGAIN) return -1;
  if (sent < 0) sent = 0;
  if (size - sent > (int)sizeof c->pending) return -1;
  memcpy(c->pending, bytes + sent, c->pending_size = size - sent);
  watch(c, 1);
  return 0;
}

static int give_chunk(struct client *c, const char *payload) {
  char chunk[1200];
  return give(c, chunk, snprintf(chunk, sizeof chunk, "%zx\r\n%s\r\n", strlen(payload), payload));
}

static int give_token(struct client *c, int number) {
  static const char *form[] = {TOKEN("content"), TOKEN("reasoning")};
  char event[512];
  int thinks = number < c->thoughts;
  uint64_t stamp = c->seed ? c->seed * 100000ull + number : now() / 1000;
  strcpy(event, form[thinks]);
  for (char *digit = strstr(event, "w@") + 17; *digit != '@'; stamp /= 10) *digit-- = '0' + stamp % 10;
  return give_chunk(c, event);
}

/* The stream's next chunk: as give(), and 2 when all of it has been sent. */
static int step(struct client *c) {
  char event[1024];
  int number = c->sent++;
  if (number < c->tokens) return give_token(c, number);
  switch (number - c->tokens) {
  case 0: return give_chunk(c, "data: " CHUNK "{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,"
                               "\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":null}]}\n\n");
  case 1:
    if (!c->usage) return 1;
    snprintf(event, sizeof event, "data: " CHUNK "],\"usage\":{\"prompt_tokens\":17,\"total_tokens\":%d,"
             "\"completion_tokens\":%d}}\n\n", 17 + c->tokens, c->tokens);
    return give_chunk(c, event);
  case 2: return give_chunk(c, "data: [DONE]\n\n");
  case 3: return give(c, "0\r\n\r\n", 5);
  default: return 2;
  }
}

/* ---- requests */

static int has(const char *head, const char *name, const char *value) {
  const char *line = strcasestr(head, name), *end = line ? strstr(line + 2, "\r\n") : NULL, *found;
  return line && (found = strcasestr(line, value)) && (!end || found < end);
}

/* What follows "key": in what was kept of the body, or NULL. */
static const char *value_of(struct client *c, const char *key) {
  char quoted[64];
  snprintf(quoted, sizeof quoted, "\"%s\"", key);
  const char *found = c->body ? strstr(c->body, quoted) : NULL;
  if (!found && c->tail_size) found = strstr(c->tail, quoted);
  return found ? found + strlen(quoted) + strspn(found + strlen(quoted), " :") : NULL;
}

static long long number_of(struct client *c, const char *key) {
  const char *value = value_of(c, key);
  return value ? atoll(value) : 0;
}

static int is_true(struct client *c, const char *key) {
  const char *value = value_of(c, key);
  return value && !strncmp(value, "true", 4);
}

static void keep(void *owner, const char *bytes, size_t size) {
  struct client *c = owner;
  if (!c->body) c->body = malloc(ROOM + 1);
  size_t head = size < ROOM - c->body_size ? size : ROOM - c->body_size;
  memcpy(c->body + c->body_size, bytes, head);
  c->body[c->body_size += head] = 0;
  bytes += head, size -= head;
  if (!size) return;
  if (!c->tail) c->tail = malloc(2 * ROOM + 1);
  if (size > ROOM) bytes += size - ROOM, size = ROOM;
  if (c->tail_size + size > 2 * ROOM) {
    memmove(c->tail, c->tail + c->tail_size - ROOM, ROOM);
    c->tail_size = ROOM;
  }
  memcpy(c->tail + c->tail_size, bytes, size);
  c->tail[c->tail_size += size] = 0;
}

static void await_request(struct client *c) {
  free(c->tail);
  c->tail = NULL;
  c->state = HEAD, c->body_size = c->tail_size = 0;
}

/* 0, or -1 when the client has gone: then it is freed. */
static int answer(struct client *c, const char *status, const char *body) {
  char whole[4096];
  int size = snprintf(whole, sizeof whole, "HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-length: %zu\r\n"
                      "content-type: application/json\r\n\r\n%s", status, strlen(body), body);
  if (give(c, whole, size) < 0 || c->closes) return leave(c), -1;
  return await_request(c), 0;
}

static int complete(struct client *c, int tokens) {
  char body[2048];
  snprintf(body, sizeof body, "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\","
           "\"created\":1764430000,\"model\":\"fake\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
           "\"content\":\"Hello there, this is the fake model speaking.\",\"refusal\":null,\"tool_calls\":[],"
           "\"reasoning\":null},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":null}],"
           "\"service_tier\":null,\"usage\":{\"prompt_tokens\":17,\"total_tokens\":%d,\"completion_tokens\":%d,"
           "\"prompt_tokens_details\":null},\"kv_transfer_params\":null}", 17 + tokens, tokens);
  return answer(c, "200 OK", body);
}

static int begin_stream(struct client *c, int tokens) {
  const char *model = value_of(c, "model"), *end = model && *model == '"' ? strchr(model + 1, '"') : NULL;
  const char *at = end ? memchr(model, '@', end - model) : NULL;
  double rate = at ? atof(at + 1) : 0;
  c->state = STREAMING, c->sent = 0, c->tokens = tokens, c->thoughts = tokens / 5;
  c->usage = is_true(c, "include_usage"), c->seed = number_of(c, "seed");
  if (give(c, EVENTS, sizeof EVENTS - 1) < 0 ||
      give_chunk(c, "data: " CHUNK "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                    "\"finish_reason\":null}],\"prompt_token_ids\":null}\n\n") < 0)
    return leave(c), -1;
  c->interval = rate > 0 ? 1e9 / rate : 0;
  c->due = now() + c->interval;
  if (c->interval) pace(c); else hurry(c);
  return 0;
}

static int dispatch(struct client *c) {
  if (c->route == HEALTH) return answer(c, "200 OK", "");
  if (c->route == MODELS)
    return answer(c, "200 OK", "{\"object\":\"list\",\"data\":[" MODEL("fake") "," MODEL("fake@50") "]}");
  if (c->route == NOWHERE) return answer(c, "404 Not Found", "{\"detail\":\"Not Found\"}");
  int tokens = number_of(c, "max_tokens");
  if (!tokens) tokens = number_of(c, "max_completion_tokens");
  if (tokens <= 0) tokens = 200;
  return is_true(c, "stream") ? begin_stream(c, tokens) : complete(c, tokens);
}

static void use(struct client *c, size_t size) { memmove(c->in, c->in + size, c->in_size -= size); }

/* Whether a whole head was there. */
static int read_head(struct client *c) {
  c->in[c->in_size] = 0;
  char *end = strstr(c->in, "\r\n\r\n"), *length;
  if (!end) return 0;
  end[2] = 0;                                         /* the last line keeps its end */
  c->route = !strncmp(c->in, "GET /health", 11) ? HEALTH : !strncmp(c->in, "GET /v1/models", 14) ? MODELS :
             !strncmp(c->in, "POST /v1/chat/completions", 25) ? CHAT : NOWHERE;
  c->left = (length = strcasestr(c->in, "\r\ncontent-length:")) ? atoll(length + 17) : 0;
  c->is_chunked = has(c->in, "\r\ntransfer-encoding:", "chunked");
  c->chunked = (struct chunked){0};
  c->closes = has(c->in, "\r\nconnection:", "close") ||
              (strstr(c->in, " HTTP/1.0\r\n") && !has(c->in, "\r\nconnection:", "keep-alive"));
  if (has(c->in, "\r\nexpect:", "100-continue")) give(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
  use(c, end + 4 - c->in);
  c->state = BODY;
  return 1;
}

/* Whether the whole body was there. */
static int read_body(struct client *c) {
  if (c->is_chunked) {
    use(c, chunked_feed(&c->chunked, c->in, c->in_size, keep, c));
    return c->chunked.state == ENDED;
  }
  size_t size = (int64_t)c->in_size < c->left ? c->in_size : (size_t)c->left;
  keep(c, c->in, size);
  use(c, size);
  return !(c->left -= size);
}

/* -1 when the client has gone: then it is freed. */
static int process(struct client *c) {
  while (c->state != STREAMING) {
    if (c->state == HEAD && !read_head(c)) break;
    if (!read_body(c)) break;
    if (dispatch(c) < 0) return -1;
  }
  return 0;
}

/* ---- events */

static void admit(int listener) {
  for (int fd, one = 1; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
    if (fd >= MOST) { close(fd); continue; }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct client *c = calloc(1, sizeof *c);
    c->fd = fd, c->place = c->turn = FREE, c->in = malloc(ROOM + 1);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
  }
}

static int on_writable(struct client *c) {
  ssize_t sent = send(c->fd, c->pending, c->pending_size, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0) return errno == EAGAIN ? 0 : (leave(c), -1);
  memmove(c->pending, c->pending + sent, c->pending_size -= sent);
  if (c->pending_size) return 0;
  watch(c, 0);
  if (c->state == STREAMING && c->place == FREE && c->turn == FREE) hurry(c);
  return 0;
}

static void on_readable(struct client *c) {
  ssize_t size = recv(c->fd, c->in + c->in_size, ROOM - c->in_size, MSG_DONTWAIT);
  if (size < 0 && errno == EAGAIN) return;
  if (size <= 0) { leave(c); return; }                /* also where ROOM is full: no request has such a head */
  c->in_size += size;
  process(c);
}

/* After a step that said 2, or -1. */
static void end(struct client *c, int said) {
  rest(c);
  if (said < 0 || c->closes) leave(c);
  else await_request(c), process(c);
}

static void serve_fast(void) {
  for (int turn = 0; turn < fast_count;) {
    struct client *c = fast[turn];
    int said = 1;
    for (int burst = 0; burst < 4 && said == 1; burst++) said = step(c);
    if (said == 1) turn++;
    else if (said == 0) rest(c);                      /* on_writable brings it back */
    else end(c, said);
  }
}

static void serve_paced(void) {
  uint64_t moment = now();
  for (int most = 4096; most-- && paced_count && paced[0]->due <= moment;) {
    struct client *c = paced[0];
    int said = c->pending_size ? 0 : step(c);
    if (said == 2 || said < 0) { end(c, said); continue; }
    if (c->sent <= c->tokens) c->due += c->interval;  /* what follows the last token goes out at once */
    if (said == 0) c->due = moment + 5000000;
    sink_down(0);
  }
}

static int listen_on(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(fd, (void *)&address, sizeof address) || listen(fd, 4096)) { perror("upstream"); exit(1); }
  return fd;
}

int main(int count, char **words) {
  signal(SIGPIPE, SIG_IGN);
  int listener = listen_on(count > 1 ? atoi(words[1]) : 18400);
  static struct epoll_event events[1024];
  struct epoll_event first = {.events = EPOLLIN, .data.ptr = NULL};
  epoll = epoll_create1(0);
  epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &first);
  for (;;) {
    struct timespec pause = {0}, *wait = NULL;
    if (fast_count) wait = &pause;
    else if (paced_count) {
      int64_t left = paced[0]->due - now();
      if (left > 0) pause.tv_sec = left / 1000000000, pause.tv_nsec = left % 1000000000;
      wait = &pause;
    }
    int ready = epoll_pwait2(epoll, events, 1024, wait, NULL);
    for (int i = 0; i < ready; i++) {
      struct client *c = events[i].data.ptr;
      if (!c) { admit(listener); continue; }
      if (events[i].events & EPOLLOUT && c->pending_size && on_writable(c) < 0) continue;
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(c);
    }
    serve_fast();
    serve_paced();
  }
}
