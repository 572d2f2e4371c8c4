/* CRC-32C (Castagnoli, reflected 0x82F63B78), as in iSCSI and ext4.
 *
 * The instruction (of SSE4.2 on x86-64, of the CRC extension on 64-bit Arm) has a latency of two or
 * three cycles and a throughput of one, so three lanes of one buffer are summed side by side and
 * joined by multiplying with x^(8n) mod P. That product is linear over GF(2), so for the two lane
 * lengths it is a table of 4 × 256 words (M. Adler, "crc32c.c", 2013, has the same scheme). */
#include "aio.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#define HAVE_INSTRUCTION 1
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#define CRC_OF_BYTE(crc, value) _mm_crc32_u8(crc, value)
#define CRC_OF_WORD(crc, value) _mm_crc32_u64(crc, value)
#elif defined(__AARCH64EL__) && defined(__GNUC__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define HAVE_INSTRUCTION 1
#define WITH_INSTRUCTION __attribute__((target("+crc")))
#define CRC_OF_BYTE(crc, value) __crc32cb(crc, value)
#define CRC_OF_WORD(crc, value) __crc32cd((uint32_t)(crc), value)
#endif

#define POLYNOMIAL 0x82F63B78u
#define LONG_LANE 8192u
#define SHORT_LANE 512u

static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t table[8][256];
static uint32_t powers[64];  /* x^(2^k) mod P */
static int hardware, forced; /* hardware: found at run time; forced: tables although it is there */
#ifdef HAVE_INSTRUCTION
static uint32_t long_shift[4][256], short_shift[4][256];
#endif

/* a · b mod P; bit 31 is x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b & 1) ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}

/* x^(8 · nbytes) mod P. The order of x divides 2^32 − 1, so x^(2^(k+32)) = x^(2^k). */
static uint32_t shift_by(uint64_t nbytes) {
    uint32_t power = 1u << 31;
    for (unsigned k = 3; nbytes != 0; nbytes >>= 1, k++) {
        if (nbytes & 1) power = multiply(powers[k & 63], power);
    }
    return power;
}

static void prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc & 1) ? (crc >> 1) ^ POLYNOMIAL : crc >> 1;
        table[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xff];
        }
    }
    powers[0] = 1u << 30;
    for (int k = 1; k < 64; k++) powers[k] = multiply(powers[k - 1], powers[k - 1]);
#ifdef HAVE_INSTRUCTION
    uint32_t by_long = shift_by(LONG_LANE), by_short = shift_by(SHORT_LANE);
    for (int k = 0; k < 4; k++) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            long_shift[k][byte] = multiply(by_long, byte << (8 * k));
            short_shift[k][byte] = multiply(by_short, byte << (8 * k));
        }
    }
#ifdef __x86_64__
    __builtin_cpu_init();
    hardware = __builtin_cpu_supports("sse4.2") != 0;
#else
    hardware = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
#endif
}

static uint32_t by_table(const unsigned char *p, uint64_t n, uint32_t crc) {
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t low =
            crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        crc = table[7][low & 0xff] ^ table[6][low >> 8 & 0xff] ^ table[5][low >> 16 & 0xff] ^
              table[4][low >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
    }
    while (n-- != 0) crc = (crc >> 8) ^ table[0][(crc ^ *p++) & 0xff];
    return crc;
}

#ifdef HAVE_INSTRUCTION
static inline uint32_t shifted(uint32_t by[4][256], uint32_t crc) {
    return by[0][crc & 0xff] ^ by[1][crc >> 8 & 0xff] ^ by[2][crc >> 16 & 0xff] ^ by[3][crc >> 24];
}

WITH_INSTRUCTION static inline uint64_t word(const unsigned char *p, uint64_t crc) {
    uint64_t value;
    memcpy(&value, p, 8);
    return CRC_OF_WORD(crc, value);
}

WITH_INSTRUCTION static uint32_t three_lanes(const unsigned char **p, uint64_t *n, uint32_t crc,
                                             uint32_t lane, uint32_t by[4][256]) {
    const unsigned char *at = *p;
    uint64_t a = crc, left = *n;
    for (; left >= 3 * (uint64_t)lane; left -= 3 * (uint64_t)lane) {
        uint64_t b = 0, c = 0;
        for (const unsigned char *end = at + lane; at < end; at += 32) {
            for (int k = 0; k < 32; k += 8) {
                a = word(at + k, a);
                b = word(at + lane + k, b);
                c = word(at + 2 * lane + k, c);
            }
        }
        a = shifted(by, (uint32_t)a) ^ (uint32_t)b;
        a = shifted(by, (uint32_t)a) ^ (uint32_t)c;
        at += 2 * lane;
    }
    *p = at;
    *n = left;
    return (uint32_t)a;
}

WITH_INSTRUCTION static uint32_t by_hardware(const unsigned char *p, uint64_t n, uint32_t crc) {
    for (; n != 0 && ((uintptr_t)p & 7) != 0; n--) crc = CRC_OF_BYTE(crc, *p++);
    crc = three_lanes(&p, &n, crc, LONG_LANE, long_shift);
    crc = three_lanes(&p, &n, crc, SHORT_LANE, short_shift);
    uint64_t wide = crc;
    for (; n >= 8; n -= 8, p += 8) wide = word(p, wide);
    crc = (uint32_t)wide;
    while (n-- != 0) crc = CRC_OF_BYTE(crc, *p++);
    return crc;
}
#endif

uint32_t aio_crc32c(uintptr_t address, uint64_t nbytes, uint32_t crc) {
    pthread_once(&once, prepare);
    const unsigned char *p = (const unsigned char *)address;
#ifdef HAVE_INSTRUCTION
    if (hardware && !__atomic_load_n(&forced, __ATOMIC_RELAXED)) return ~by_hardware(p, nbytes, ~crc);
#endif
    return ~by_table(p, nbytes, ~crc);
}

uint32_t aio_crc32c_combine(uint32_t a, uint32_t b, uint64_t nbytes_b) {
    pthread_once(&once, prepare);
    return multiply(shift_by(nbytes_b), a) ^ b;
}

uint32_t aio_crc32c_zeros(uint64_t nbytes) {
    pthread_once(&once, prepare);
    return ~multiply(shift_by(nbytes), 0xFFFFFFFFu);
}

int aio_crc32c_force_table(int on) {
    pthread_once(&once, prepare);
    __atomic_store_n(&forced, on, __ATOMIC_RELAXED);
    return hardware;
}
