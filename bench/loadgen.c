/* A closed-loop load generator: one epoll thread, keep-alive. Prints one JSON object.
 *
 *   loadgen HOST PORT REQUEST_FILE [--conns N] [--requests N] [--secs S] [--ramp S] [--grace S] [--sse 1]
 *                                  [--tokens N] [--window FROM,TO] [--spread 1]
 *
 * Each of `conns` connections (1) sends the file's bytes, reads the answer whole and begins again, until `secs` (3) have
 * passed or `requests` were sent; what is open then has `grace` seconds (30). `ramp` is the time over which the first
 * requests are begun: at even distances, so that paced streams fall into step with each other where a distance divides
 * their pace, or, with `spread`, at random. With `sse` the answer is read as events: a data line with " w@" and 16
 * digits is a token that was sent at that moment of CLOCK_MONOTONIC (us); a stream with another number of them than
 * `tokens`, or without a last event, is counted as cut. `window` limits gaps, relay times and window_tokens to these
 * seconds. Times are microseconds. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "chunked.h"

#define MOST 8000000                                  /* samples in a series */
#define SECOND 1000000000ull
#define UNTIL_CLOSE (-1)

struct series { uint32_t *samples; size_t count; };
enum state { WAITING, CONNECTING, SENDING, HEAD, BODY, DONE };

struct connection {
  int fd; enum state state; size_t sent;
  char head[16384]; size_t head_size;
  char line[8192]; size_t line_size;                  /* of an event; the rest of a longer line is dropped */
  int64_t left; int is_chunked, closes, status; struct chunked chunked;
  uint64_t begun, last, start; long tokens; int heard, ended;
};

static struct series latency, first_event, first_token, gap, relay;
static long conns = 1, most = 1L << 40, tokens_wanted, sse, spread;
static double secs = 3, ramp, grace = 30, window_from, window_to = 1e9;
static long issued, answered, errors, refused, all_tokens, window_tokens, cut;
static char trouble[200];                             /* the first one, printable */
static const char *request; static size_t request_size;
static struct sockaddr_in address;
static int epoll;
static uint64_t moment, begun, last_start;            /* ns; moment: of the latest event */

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * SECOND + t.tv_nsec;
}

static void add(struct series *series, uint64_t nanoseconds) {
  uint64_t us = nanoseconds / 1000;
  if (!series->samples)
    series->samples = mmap(0, MOST * 4ul, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (series->count < MOST) series->samples[series->count++] = us < UINT32_MAX ? us : UINT32_MAX;
}

static void note(const char *what, const char *detail, size_t size) {
  if (*trouble) return;
  size_t at = snprintf(trouble, sizeof trouble, "%s: ", what);
  for (size_t i = 0; i < size && detail[i] && at < sizeof trouble - 1; i++)
    if (detail[i] >= 32 && detail[i] != '"' && detail[i] != '\\') trouble[at++] = detail[i];
  trouble[at] = 0;
}

/* ---- a request */

static void watch(struct connection *c, int operation, uint32_t events) {
  struct epoll_event event = {.events = events, .data.ptr = c};
  epoll_ctl(epoll, operation, c->fd, &event);
}

static void drop(struct connection *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
}

static int is_over(void) { return issued >= most || moment >= last_start; }

static void fail(struct connection *c, const char *what, const char *detail, size_t size) {
  errors++;
  note(what, detail, size);
  drop(c);
  c->state = WAITING, c->start = moment + SECOND / 500;
}

static void send_request(struct connection *c) {
  while (c->sent < request_size) {
    ssize_t sent = send(c->fd, request + c->sent, request_size - c->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EAGAIN) { watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT); return; }
    if (sent < 0) break;                              /* it may have been answered before it was sent: read that */
    c->sent += sent;
  }
  c->state = HEAD;
  watch(c, EPOLL_CTL_MOD, EPOLLIN);
}

static void begin(struct connection *c) {
  if (is_over()) { drop(c); c->state = DONE; return; }
  issued++;
  c->sent = c->head_size = c->line_size = 0;
  c->tokens = c->heard = c->ended = c->last = 0;
  c->begun = moment = now();
  if (c->fd >= 0) { c->state = SENDING; send_request(c); return; }
  int one = 1;
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (connect(c->fd, (void *)&address, sizeof address) < 0 && errno != EINPROGRESS) {
    fail(c, "connect", strerror(errno), 30);
    return;
  }
  c->state = CONNECTING;
  watch(c, EPOLL_CTL_ADD, EPOLLOUT);
}

static void finish(struct connection *c) {
  moment = now();
  if (c->status != 200) refused++;
  else {
    answered++;
    add(&latency, moment - c->begun);
    cut += sse && (!c->ended || (tokens_wanted && c->tokens != tokens_wanted));
  }
  if (c->closes) drop(c);
  if (c->status == 200) { begin(c); return; }
  c->state = WAITING, c->start = moment + SECOND / 1000;
}

/* ---- an answer */

static void on_token(struct connection *c, const char *digits) {
  uint64_t sent = 0;
  for (int i = 0; i < 16; i++) sent = sent * 10 + (digits[i] - '0');
  all_tokens++, c->tokens++;
  if (!c->last) add(&first_token, moment - c->begun);
  if (moment >= begun + (uint64_t)(window_from * SECOND) && moment < begun + (uint64_t)(window_to * SECOND)) {
    window_tokens++;
    add(&relay, moment > sent * 1000 ? moment - sent * 1000 : 0);
    if (c->last) add(&gap, moment - c->last);
  }
  c->last = moment;
}

static void on_line(struct connection *c) {
  if (c->line_size < 5 || memcmp(c->line, "data:", 5)) return;
  if (!c->heard) { c->heard = 1; add(&first_event, moment - c->begun); }
  c->line[c->line_size] = 0;
  char *stamp = strstr(c->line, "w@");
  if (stamp && stamp + 18 <= c->line + c->line_size && strstr(c->line, "\"delta\"")) on_token(c, stamp + 2);
  else if (strstr(c->line, "[DONE]") || strstr(c->line, "message_stop") || strstr(c->line, "response.completed")) c->ended = 1;
}

static void take(void *owner, const char *bytes, size_t size) {
  struct connection *c = owner;
  while (sse && size) {
    const char *end = memchr(bytes, '\n', size);
    size_t span = end ? (size_t)(end - bytes) : size, room = sizeof c->line - 1 - c->line_size;
    memcpy(c->line + c->line_size, bytes, span < room ? span : room);
    c->line_size += span < room ? span : room;
    if (!end) return;
    on_line(c);
    c->line_size = 0;
    bytes += span + 1, size -= span + 1;
  }
}

static char *field(struct connection *c, const char *name) {
  char *found = strcasestr(c->head, name);
  return found ? found + strlen(name) + strspn(found + strlen(name), " ") : NULL;
}

/* Takes the head's bytes; returns how many. The state is BODY when it was whole. */
static size_t read_head(struct connection *c, const char *bytes, size_t size) {
  size_t before = c->head_size, room = sizeof c->head - 1 - before, span = size < room ? size : room;
  memcpy(c->head + before, bytes, span);
  c->head[c->head_size = before + span] = 0;
  char *end = strstr(c->head, "\r\n\r\n"), *value;
  if (!end) { if (span == room) fail(c, "head", "too large", 9); return span; }
  size_t used = end + 4 - c->head - before;
  c->status = atoi(c->head + 9);
  if (c->status == 100) { c->head_size = 0; return used; }
  end[2] = 0;
  c->is_chunked = (value = field(c, "\r\ntransfer-encoding:")) && !strncasecmp(value, "chunked", 7);
  c->chunked = (struct chunked){0};
  c->left = !c->is_chunked && (value = field(c, "\r\ncontent-length:")) ? atoll(value) : UNTIL_CLOSE;
  c->closes = !strncmp(c->head, "HTTP/1.0", 8) || ((value = field(c, "\r\nconnection:")) && !strncasecmp(value, "close", 5));
  if (c->state == SENDING) c->closes = 1;
  c->state = BODY;
  if (c->status != 200) note("status", c->head + 9, 3), note("", bytes + used, size - used);
  return used;
}

static int read_body(struct connection *c, const char *bytes, size_t size) {
  if (c->is_chunked) {
    chunked_feed(&c->chunked, bytes, size, take, c);
    return c->chunked.state == ENDED;
  }
  if (c->left != UNTIL_CLOSE && (int64_t)size > c->left) size = c->left;
  take(c, bytes, size);
  return c->left != UNTIL_CLOSE && !(c->left -= size);
}

static void on_end(struct connection *c) {
  if (c->state != BODY) fail(c, "the end before a head", "", 0);
  else if (c->is_chunked || c->left != UNTIL_CLOSE) fail(c, "the end amid a body", "", 0);
  else { c->closes = 1; finish(c); }
}

static void on_readable(struct connection *c) {
  static char bytes[262144];
  for (ssize_t size = sizeof bytes, at; size == sizeof bytes;) {
    size = recv(c->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (size < 0 && errno == EAGAIN) return;
    moment = now();
    if (size < 0) { fail(c, "recv", strerror(errno), 30); return; }
    if (size == 0) { on_end(c); return; }
    for (at = 0; c->state == HEAD || c->state == SENDING;) {
      at += read_head(c, bytes + at, size - at);
      if (c->state != BODY && at >= size) break;
    }
    if (c->state == BODY && (at < size || !c->left) && read_body(c, bytes + at, size - at)) { finish(c); return; }
    if (c->state == WAITING) return;
  }
}

static void on_event(struct connection *c, uint32_t events) {
  if (c->state == CONNECTING) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) { fail(c, "connect", strerror(error), 30); return; }
    c->state = SENDING;
    send_request(c);
    return;
  }
  if (c->state == SENDING && events & EPOLLOUT) send_request(c);
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(c);
}

/* ---- the run */

/* Begin what is due. Returns the moment at which the next is, UINT64_MAX if none is to come, 0 if all is done. */
static uint64_t start_due(struct connection *all) {
  uint64_t next = 0;
  for (struct connection *c = all; c < all + conns; c++) {
    if (c->state == WAITING && is_over()) { drop(c); c->state = DONE; }
    if (c->state == WAITING && c->start <= moment) begin(c);
    if (c->state == WAITING && (next == 0 || c->start < next)) next = c->start;
    else if (c->state != DONE && next == 0) next = UINT64_MAX;
  }
  return next;
}

static void run(struct connection *all) {
  static struct epoll_event events[1024];
  uint64_t hard_end = last_start + (uint64_t)(grace * SECOND), next = moment, look = 0;
  while ((moment = now()) < hard_end) {
    if (moment >= next || moment >= look) {
      if (!(next = start_due(all))) return;
      look = moment + SECOND / 50;                    /* a connection may have failed, or come to its end, meanwhile */
    }
    uint64_t until = next < look ? next : look;
    struct timespec pause = {0, until > moment ? until - moment : 0};
    int ready = epoll_pwait2(epoll, events, 1024, &pause, NULL);
    moment = now();
    for (int i = 0; i < ready; i++) {
      struct connection *c = events[i].data.ptr;
      if (c->fd >= 0) on_event(c, events[i].events);
    }
  }
}

static int ascending(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return (x > y) - (x < y);
}

static void print_series(const char *name, struct series *series) {
  if (!series->count) { printf(",\"%s\":null", name); return; }
  qsort(series->samples, series->count, 4, ascending);
  size_t last = series->count - 1;
  printf(",\"%s\":{\"count\":%zu,\"p50\":%u,\"p99\":%u,\"max\":%u}", name, series->count, series->samples[last / 2],
         series->samples[(size_t)(last * .99)], series->samples[last]);
}

static void print_all(struct connection *all) {
  long unfinished = 0;
  for (struct connection *c = all; c < all + conns; c++) unfinished += c->state != DONE && c->state != WAITING;
  printf("{\"seconds\":%.3f,\"answered\":%ld,\"errors\":%ld,\"refused\":%ld,\"unfinished\":%ld,\"cut\":%ld,\"tokens\":%ld,"
         "\"window_tokens\":%ld,\"trouble\":\"%s\"", (now() - begun) / 1e9, answered, errors, refused, unfinished, cut,
         all_tokens, window_tokens, trouble);
  print_series("latency_us", &latency);
  print_series("first_event_us", &first_event);
  print_series("first_token_us", &first_token);
  print_series("gap_us", &gap);
  print_series("relay_us", &relay);
  printf("}\n");
}

static void read_options(int count, char **words) {
  for (int i = 4; i + 1 < count; i += 2) {
    char *name = words[i], *value = words[i + 1];
    if (!strcmp(name, "--conns")) conns = atol(value);
    else if (!strcmp(name, "--requests")) most = atol(value);
    else if (!strcmp(name, "--secs")) secs = atof(value);
    else if (!strcmp(name, "--ramp")) ramp = atof(value);
    else if (!strcmp(name, "--grace")) grace = atof(value);
    else if (!strcmp(name, "--sse")) sse = atol(value);
    else if (!strcmp(name, "--spread")) spread = atol(value);
    else if (!strcmp(name, "--tokens")) tokens_wanted = atol(value);
    else if (!strcmp(name, "--window")) sscanf(value, "%lf,%lf", &window_from, &window_to);
  }
}

/* When a connection begins, as a share of the ramp. */
static double turn_of(long i) {
  static uint32_t chance = 1;
  chance = chance * 1664525u + 1013904223u;           /* the same moments in each run */
  return spread ? chance / 4294967296.0 : (double)i / conns;
}

int main(int count, char **words) {
  if (count < 4) { fprintf(stderr, "loadgen HOST PORT REQUEST_FILE [--conns N] ...\n"); return 2; }
  signal(SIGPIPE, SIG_IGN);
  read_options(count, words);
  address.sin_family = AF_INET, address.sin_port = htons(atoi(words[2]));
  struct stat about;
  int file = open(words[3], O_RDONLY);
  if (inet_pton(AF_INET, words[1], &address.sin_addr) != 1 || file < 0 || fstat(file, &about)) { perror(words[3]); return 2; }
  request = mmap(0, request_size = about.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0);
  epoll = epoll_create1(0);
  struct connection *all = calloc(conns, sizeof *all);
  begun = moment = now();
  last_start = begun + (uint64_t)(secs * SECOND);
  for (long i = 0; i < conns; i++) all[i].fd = -1, all[i].start = begun + (uint64_t)(ramp * SECOND * turn_of(i));
  run(all);
  print_all(all);
  return 0;
}
