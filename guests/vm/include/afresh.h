/* The interface of a C guest of an afresh micro-VM: entry, host functions, logging, a heap.
 *
 * One header. In exactly one source file define AFRESH_IMPLEMENTATION before including it, and
 * define the two functions below. Build with
 *
 *     cc -O2 -static-pie -fPIE -nostdlib -ffreestanding -fno-stack-protector \
 *        -Wl,--no-dynamic-linker -Wl,-z,max-page-size=4096 -Wl,-z,noexecstack \
 *        -I include guest.c -o guest.elf
 *
 * A guest has one thread, no system calls and no thread-local storage. Its writes during
 * afresh_init are part of its image; the host's reset undoes its writes during a call.
 */
#ifndef AFRESH_H
#define AFRESH_H

#include <stddef.h>
#include <stdint.h>

#define AFRESH_ABI_VERSION 1
#define AFRESH_BOOT_MAGIC 0x4d56485345524641ull /* "AFRESHVM" */
#define AFRESH_PORT 0xa8

enum {
    AFRESH_CALL_READY = 1,
    AFRESH_CALL_DONE = 2,
    AFRESH_CALL_PANIC = 3,
    AFRESH_CALL_LOG = 4,
    AFRESH_CALL_FIND = 5,
    AFRESH_CALL_HOST = 6,
    AFRESH_CALL_RANDOM = 7,
    AFRESH_CALL_GENERATION = 8
};

enum {
    AFRESH_ERR_NO_FUNCTION = -1,
    AFRESH_ERR_ARGUMENTS = -2,
    AFRESH_ERR_FAILED = -3,
    AFRESH_ERR_CAPACITY = -4
};

enum { AFRESH_ERROR = 1, AFRESH_WARN, AFRESH_INFO, AFRESH_DEBUG, AFRESH_TRACE };

struct afresh_region {
    uint64_t address;
    uint64_t len;
    uint64_t kind; /* 0 read-write, 1 read-only, 2 shared with the host, 3 gap */
};

struct afresh_boot {
    uint64_t magic;
    uint32_t version;
    uint32_t region_count;
    uint64_t heap, heap_len;
    uint64_t input, input_capacity;
    uint64_t stack, stack_len;
    struct afresh_region regions[64];
};

/* You define it. Called once, before the guest's image is taken. */
void afresh_init(void);
/* You define it. Called for every call. Returns a status, 0 for success. The output is the last
 * argument of afresh_output, which must stay valid until the function returns. */
int64_t afresh_call(const uint8_t *input, size_t len);

/* Sets the output of the present call. */
void afresh_output(const void *bytes, size_t len);
/* The host's description of this guest's memory. */
const struct afresh_boot *afresh_boot_info(void);

static inline int64_t afresh_hypercall(uint32_t call, uint64_t a, uint64_t b, uint64_t c, uint64_t d,
                                       uint64_t e) {
    uint64_t result = call;
    register uint64_t r10 __asm__("r10") = d;
    register uint64_t r8 __asm__("r8") = e;
    __asm__ volatile("outl %%eax, %[port]"
                     : "+a"(result)
                     : [port] "N"(AFRESH_PORT), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                     : "memory");
    return (int64_t)result;
}

size_t strlen(const char *text);

/* Sends a message to the host's log. */
static inline void afresh_log(int level, const char *message) {
    afresh_hypercall(AFRESH_CALL_LOG, (uint64_t)level, (uint64_t)message, strlen(message), 0, 0);
}

/* Ends the call with an error message. */
__attribute__((noreturn)) static inline void afresh_panic(const char *message) {
    for (;;)
        afresh_hypercall(AFRESH_CALL_PANIC, (uint64_t)message, strlen(message), 0, 0, 0);
}

/* The number of a host function, or AFRESH_ERR_NO_FUNCTION. */
static inline int64_t afresh_find(const char *name) {
    return afresh_hypercall(AFRESH_CALL_FIND, (uint64_t)name, strlen(name), 0, 0, 0);
}

/* Calls a host function: arguments one after another, little-endian, without padding; byte strings
 * as a 32-bit length and the bytes. Returns the length of the result, encoded likewise, or an
 * error. */
static inline int64_t afresh_host(int64_t function, const void *arguments, size_t len, void *result,
                                  size_t capacity) {
    return afresh_hypercall(AFRESH_CALL_HOST, (uint64_t)function, (uint64_t)arguments, len,
                            (uint64_t)result, capacity);
}

/* Randomness that differs in every restore and every fork. */
static inline void afresh_random(void *buffer, size_t len) {
    afresh_hypercall(AFRESH_CALL_RANDOM, (uint64_t)buffer, len, 0, 0, 0);
}

/* A number that no other restore or fork shares: reseed generators when it changes. */
static inline uint64_t afresh_generation(void) {
    return (uint64_t)afresh_hypercall(AFRESH_CALL_GENERATION, 0, 0, 0, 0, 0);
}

void *malloc(size_t size);
void free(void *pointer);
void *calloc(size_t count, size_t size);
void *realloc(void *pointer, size_t size);
void *memcpy(void *to, const void *from, size_t len);
void *memmove(void *to, const void *from, size_t len);
void *memset(void *to, int byte, size_t len);
int memcmp(const void *a, const void *b, size_t len);

#ifdef AFRESH_IMPLEMENTATION

static const struct afresh_boot *afresh_boot_page;
static const void *afresh_output_bytes;
static size_t afresh_output_len;
static uintptr_t afresh_heap_next, afresh_heap_end;
/* Free blocks by the power of two of their size. */
static void *afresh_free_blocks[48];

const struct afresh_boot *afresh_boot_info(void) { return afresh_boot_page; }

void afresh_output(const void *bytes, size_t len) {
    afresh_output_bytes = bytes;
    afresh_output_len = len;
}

__attribute__((noreturn)) static void afresh_enter(const uint8_t *input, size_t len) {
    afresh_output(0, 0);
    int64_t status = afresh_call(input, len);
    for (;;)
        afresh_hypercall(AFRESH_CALL_DONE, (uint64_t)status, (uint64_t)afresh_output_bytes,
                         afresh_output_len, 0, 0);
}

__attribute__((noreturn, used)) void _start(const struct afresh_boot *boot) {
    if (boot->magic != AFRESH_BOOT_MAGIC || boot->version != AFRESH_ABI_VERSION)
        afresh_panic("the host speaks another version of the interface");
    afresh_boot_page = boot;
    afresh_heap_next = boot->heap;
    afresh_heap_end = boot->heap + boot->heap_len;
    afresh_init();
    for (;;)
        afresh_hypercall(AFRESH_CALL_READY, (uint64_t)&afresh_enter, AFRESH_ABI_VERSION, 0, 0, 0);
}

/* Blocks are powers of two; the 16 bytes in front of each hold its class. */
void *malloc(size_t size) {
    unsigned class = 5;
    while (class < 47 && ((size_t)1 << class) - 16 < size)
        class ++;
    if (((size_t)1 << class) - 16 < size)
        return 0;
    char *block = afresh_free_blocks[class];
    if (block) {
        afresh_free_blocks[class] = *(void **)(block + 16);
    } else {
        if (((size_t)1 << class) > afresh_heap_end - afresh_heap_next)
            return 0;
        block = (char *)afresh_heap_next;
        afresh_heap_next += (size_t)1 << class;
    }
    *(uint64_t *)block = class;
    return block + 16;
}

void free(void *pointer) {
    if (!pointer)
        return;
    char *block = (char *)pointer - 16;
    unsigned class = (unsigned)*(uint64_t *)block;
    *(void **)(block + 16) = afresh_free_blocks[class];
    afresh_free_blocks[class] = block;
}

void *calloc(size_t count, size_t size) {
    size_t total;
    if (__builtin_mul_overflow(count, size, &total))
        return 0;
    void *pointer = malloc(total);
    return pointer ? memset(pointer, 0, total) : 0;
}

void *realloc(void *pointer, size_t size) {
    if (!pointer)
        return malloc(size);
    size_t old = ((size_t)1 << *(uint64_t *)((char *)pointer - 16)) - 16;
    if (size <= old)
        return pointer;
    void *new_pointer = malloc(size);
    if (new_pointer) {
        memcpy(new_pointer, pointer, old);
        free(pointer);
    }
    return new_pointer;
}

/* String instructions, so that no compiler turns a loop into a call of itself. */
void *memcpy(void *to, const void *from, size_t len) {
    void *start = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(len) : : "memory");
    return start;
}

void *memmove(void *to, const void *from, size_t len) {
    if ((uintptr_t)to - (uintptr_t)from >= len)
        return memcpy(to, from, len);
    char *last_to = (char *)to + len - 1;
    const char *last_from = (const char *)from + len - 1;
    __asm__ volatile("std; rep movsb; cld" : "+D"(last_to), "+S"(last_from), "+c"(len) : : "memory", "cc");
    return to;
}

void *memset(void *to, int byte, size_t len) {
    void *start = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(len) : "a"(byte) : "memory");
    return start;
}

int memcmp(const void *a, const void *b, size_t len) {
    const volatile unsigned char *x = a, *y = b;
    for (; len; len--, x++, y++)
        if (*x != *y)
            return *x - *y;
    return 0;
}

size_t strlen(const char *text) {
    const volatile char *end = text;
    while (*end)
        end++;
    return (size_t)(end - text);
}

#endif
#endif
