// The target: a reader of JSON documents that enters every key into an index. The index is built
// before the first input, and each input changes it, so no run may see the changes of the last one.
// Its defect is a key of three certain letters in a list of lists.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DEPTH = 64, KEY = 24 };

struct entry {
    struct entry *next;
    uint64_t uses;
    char key[KEY];
    char padding[4096 - KEY - 16];
};

static struct entry **buckets;
static size_t bucket_count;
static const uint8_t *at, *end;
static double total;

static size_t hash(const char *key) {
    uint64_t sum = 1469598103934665603u;
    while (*key) sum = (sum ^ (uint8_t)*key++) * 1099511628211u;
    return sum % bucket_count;
}

static struct entry *file(const char *key) {
    struct entry **place = &buckets[hash(key)];
    for (; *place; place = &(*place)->next)
        if (!strcmp((*place)->key, key)) return *place;
    *place = calloc(1, sizeof **place);
    strcpy((*place)->key, key);
    return *place;
}

// Builds an index of a size in MiB.
void target_warm(size_t mib) {
    size_t entries = mib * 256 + 16;
    bucket_count = entries * 2 + 1;
    buckets = calloc(bucket_count, sizeof *buckets);
    for (size_t number = 0; number < entries; number++) {
        char key[KEY] = "key";
        for (size_t rest = number, digit = 3; rest; rest /= 10) key[digit++] = '0' + rest % 10;
        file(key)->uses = number;
    }
}

static void space(void) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) at++;
}

static int literal(const char *word) {
    size_t len = strlen(word);
    if ((size_t)(end - at) < len || memcmp(at, word, len)) return 0;
    at += len;
    return 1;
}

static int number(void) {
    double value = 0, scale = 1;
    int minus = at < end && *at == '-' && at++;
    if (at >= end || *at < '0' || *at > '9') return 0;
    while (at < end && *at >= '0' && *at <= '9') value = value * 10 + (*at++ - '0');
    if (at < end && *at == '.')
        for (at++; at < end && *at >= '0' && *at <= '9'; at++) value += (*at - '0') * (scale /= 10);
    if (at < end && (*at | 32) == 'e') {
        int power = 0;
        at++;
        if (at < end && (*at == '+' || *at == '-')) at++;
        while (at < end && *at >= '0' && *at <= '9' && power < 300) power = power * 10 + (*at++ - '0');
        while (power-- > 0) value *= 10;
    }
    total += minus ? -value : value;
    return 1;
}

static int hex(uint8_t digit) {
    if (digit >= '0' && digit <= '9') return digit - '0';
    if ((digit | 32) >= 'a' && (digit | 32) <= 'f') return (digit | 32) - 'a' + 10;
    return -1;
}

static int string(char *out) {
    size_t len = 0;
    if (at >= end || *at++ != '"') return 0;
    while (at < end && *at != '"') {
        int value = *at++;
        if (value == '\\') {
            if (at >= end) return 0;
            switch (*at++) {
            case 'n': value = '\n'; break;
            case 't': value = '\t'; break;
            case '"': value = '"'; break;
            case '\\': value = '\\'; break;
            case 'u':
                if (end - at < 4) return 0;
                value = 0;
                for (int digit = 0; digit < 4; digit++, at++) {
                    if (hex(*at) < 0) return 0;
                    value = value * 16 + hex(*at);
                }
                break;
            default: return 0;
            }
        }
        if (len < KEY - 1 && value) out[len++] = value;
    }
    out[len] = 0;
    return at < end && *at++ == '"';
}

static int value(int depth, int lists) {
    char key[KEY];
    if (depth > DEPTH) return 0;
    space();
    if (at >= end) return 0;
    switch (*at) {
    case '{':
        at++;
        space();
        if (at < end && *at == '}') return at++, 1;
        for (;;) {
            space();
            if (!string(key)) return 0;
            struct entry *entry = file(key);
            entry->uses++;
            if (lists == 2 && key[0] == 'b')
                if (key[1] == 'u')
                    if (key[2] == 'g') *(volatile int *)0 = 1;
            space();
            if (at >= end || *at++ != ':' || !value(depth + 1, 0)) return 0;
            space();
            if (at >= end) return 0;
            if (*at == '}') return at++, 1;
            if (*at++ != ',') return 0;
        }
    case '[':
        at++;
        space();
        if (at < end && *at == ']') return at++, 1;
        for (;;) {
            if (!value(depth + 1, lists + 1)) return 0;
            space();
            if (at >= end) return 0;
            if (*at == ']') return at++, 1;
            if (*at++ != ',') return 0;
        }
    case '"': return string(key);
    case 't': return literal("true");
    case 'f': return literal("false");
    case 'n': return literal("null");
    default: return number();
    }
}

void target_run(const uint8_t *input, size_t len) {
    at = input;
    end = input + len;
    if (value(0, 0)) space();
}
