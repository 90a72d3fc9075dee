/* A test internet in one process: packets between the TUN devices of sites, delayed, lost and dropped as lines would do it.

   Packets of site i wait in its uplink (drop-tail, so many bytes at so many bytes/s), may be lost, travel, wait in the downlink of the
   site that their address names, and are written there. Nothing really waits in a queue: when a packet comes, the moment at which it
   leaves follows from when the line is free, and what is ahead of it from that.

   Commands come as lines on standard input, numbers in bytes, bytes/s, nanoseconds and chances; answers go to standard output:
       site I FD UP DOWN UPBUFFER DOWNBUFFER     address 10.77.0.(I + 1); again with FD -1: change it
       pair I J DELAY LOSS                       from I to J, one way
       cut I 0|1                                 whether the site's line is dead
       count                                     a line of counters for each site, and `end`
   It ends with its standard input. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { SITES = 64, MTU = 1500, BATCH = 256 };

/* While packets are under way the process looks every TICK, and not for each packet: a quarter of a millisecond is nothing beside the
   times of the internet, and waking up is what costs. */
static const int64_t TICK = 250000, IDLE = 20000000; /* ns */

typedef struct {
    int64_t at;
    uint64_t order;
    int from, to, delivered, size;
    unsigned char bytes[MTU];
} packet;

static struct {
    int fd, cut;
    double up, down;
    int64_t up_buffer, down_buffer;
    double up_free, down_free; /* when the line has sent what it was given, in ns */
    uint64_t sent, sent_packets, received, received_packets, lost, dropped;
} site[SITES];

static int64_t delay[SITES][SITES];
static double loss[SITES][SITES];
static int sites;

/* --- randomness: xorshift64*, seeded by the first argument */

static uint64_t state;

static double chance(void) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (double)((state * 2685821657736338717ull) >> 11) / 9007199254740992.0;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* --- what is to happen, in a heap by time */

static packet **heap;
static size_t count, room;
static uint64_t order;

static int before(const packet *a, const packet *b) { return a->at != b->at ? a->at < b->at : a->order < b->order; }

static void push(packet *p) {
    if (count == room) {
        room = room ? 2 * room : 1024;
        heap = realloc(heap, room * sizeof *heap);
        if (!heap) exit(1);
    }
    p->order = order++;
    size_t i = count++;
    for (; i && before(p, heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = p;
}

static packet *pop(void) {
    packet *first = heap[0], *last = heap[--count];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= count) break;
        if (child + 1 < count && before(heap[child + 1], heap[child])) child++;
        if (!before(heap[child], last)) break;
        heap[i] = heap[child], i = child;
    }
    heap[i] = last;
    return first;
}

static packet *spare;

static packet *fresh(void) {
    packet *p = spare;
    if (p) {
        spare = NULL;
        return p;
    }
    p = malloc(sizeof *p);
    if (!p) exit(1);
    return p;
}

static void done(packet *p) {
    if (spare) free(p);
    else spare = p;
}

/* --- a packet's way */

/* When a packet that comes at `at` has gone through a line, or -1 when its buffer is full. */
static int64_t through(double *line_free, double rate, int64_t buffer, int64_t at, int size) {
    double start = *line_free > (double)at ? *line_free : (double)at;
    if ((start - (double)at) * rate / 1e9 + size > (double)buffer) return -1;
    *line_free = start + size / rate * 1e9;
    return (int64_t)*line_free;
}

static void leaves(packet *p, int64_t at) {
    int i = p->from, j = p->to;
    site[i].sent += p->size, site[i].sent_packets++;
    int64_t gone = site[i].cut || site[j].cut ? -1 : through(&site[i].up_free, site[i].up, site[i].up_buffer, at, p->size);
    if (gone < 0 || chance() < loss[i][j]) {
        if (gone < 0) site[i].dropped++;
        else site[i].lost++;
        done(p);
        return;
    }
    p->at = gone + delay[i][j], p->delivered = 0;
    push(p);
}

static void arrives(packet *p) {
    int j = p->to;
    if (p->delivered) {
        if (!site[j].cut && write(site[j].fd, p->bytes, p->size) == p->size)
            site[j].received += p->size, site[j].received_packets++;
        else site[j].dropped++;
        done(p);
        return;
    }
    int64_t at = site[j].cut ? -1 : through(&site[j].down_free, site[j].down, site[j].down_buffer, p->at, p->size);
    if (at < 0) {
        site[j].dropped++;
        done(p);
        return;
    }
    p->at = at, p->delivered = 1;
    push(p);
}

static int take(int i) {
    int64_t at = now();
    int n = 0;
    for (; n < BATCH; n++) {
        packet *p = fresh();
        ssize_t size = read(site[i].fd, p->bytes, MTU);
        if (size <= 0) {
            done(p);
            break;
        }
        p->from = i, p->size = (int)size, p->to = -1;
        if (size >= 20 && p->bytes[0] >> 4 == 4 && p->bytes[16] == 10 && p->bytes[17] == 77 && p->bytes[18] == 0)
            p->to = p->bytes[19] - 1;
        if (p->to < 0 || p->to >= sites || p->to == i) {
            done(p);
            continue;
        }
        leaves(p, at);
    }
    return n;
}

/* --- commands */

static void obey(const char *line) {
    int i, j, fd, dead;
    double a, b, c, d;
    if (sscanf(line, "site %d %d %lf %lf %lf %lf", &i, &fd, &a, &b, &c, &d) == 6 && i >= 0 && i < SITES) {
        if (fd >= 0) site[i].fd = fd, fcntl(fd, F_SETFL, O_NONBLOCK);
        site[i].up = a, site[i].down = b, site[i].up_buffer = (int64_t)c, site[i].down_buffer = (int64_t)d;
        if (i >= sites) sites = i + 1;
    } else if (sscanf(line, "pair %d %d %lf %lf", &i, &j, &a, &b) == 4 && i >= 0 && i < SITES && j >= 0 && j < SITES) {
        delay[i][j] = (int64_t)a, loss[i][j] = b;
    } else if (sscanf(line, "cut %d %d", &i, &dead) == 2 && i >= 0 && i < SITES) {
        site[i].cut = dead;
    } else if (!strncmp(line, "count", 5)) {
        for (i = 0; i < sites; i++)
            printf("%llu %llu %llu %llu %llu %llu\n", (unsigned long long)site[i].sent, (unsigned long long)site[i].sent_packets,
                   (unsigned long long)site[i].received, (unsigned long long)site[i].received_packets,
                   (unsigned long long)site[i].lost, (unsigned long long)site[i].dropped);
        puts("end");
        fflush(stdout);
    } else {
        fprintf(stderr, "netlab: no such command: %s\n", line);
    }
}

static void hear(void) {
    static char text[1 << 16];
    static size_t held;
    ssize_t size = read(0, text + held, sizeof text - held - 1);
    if (size <= 0) exit(0); /* whoever started this is gone */
    held += (size_t)size;
    text[held] = 0;
    char *line = text, *end;
    for (; (end = strchr(line, '\n')); line = end + 1) *end = 0, obey(line);
    held -= (size_t)(line - text);
    memmove(text, line, held);
}

int main(int arguments, char **argument) {
    state = arguments > 1 ? strtoull(argument[1], NULL, 10) * 2 + 1 : 1;
    for (int n = 0; n < 16; n++) chance();
    prctl(PR_SET_TIMERSLACK, 1000ul);
    struct pollfd wait[SITES + 1] = {{.fd = 0, .events = POLLIN}};
    int64_t last = now();
    for (;;) {
        int64_t at = now(), left = 1000000000ll;
        while (count && heap[0]->at <= at + TICK / 2) arrives(pop());
        int busy = at - last < IDLE;
        if (count && heap[0]->at - at < left) left = heap[0]->at - at;
        if (busy || left < TICK) left = TICK;
        /* when nothing is going on, the next packet wakes it up */
        int some = busy ? 1 : sites + 1;
        for (int i = 0; i < sites; i++) wait[i + 1] = (struct pollfd){.fd = site[i].fd, .events = POLLIN};
        struct timespec most = {left / 1000000000ll, left % 1000000000ll};
        if (ppoll(wait, (nfds_t)some, &most, NULL) < 0 && errno != EINTR) return 1;
        for (int i = 0; i < sites; i++)
            if (take(i)) last = now();
        if (wait[0].revents) hear();
    }
}
