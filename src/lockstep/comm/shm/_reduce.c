/* Element-wise reductions over the ranks' buffers, always in the order of the ranks; halves accumulate in float. */
#include <stdbool.h>
#include <string.h>

#include "_shm.h"

#define BLOCK 1024 /* elements; a block of accumulators stays in the first-level cache */

enum { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, NUM_OPS };
enum { F32, F64, F16, BF16, I8, U8, I16, I32, I64, U16, U32, U64, NUM_DTYPES };

size_t lockstep_element_bytes(int dtype) {
    static const size_t bytes[NUM_DTYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 2, 4, 8};
    return bytes[dtype];
}

static inline float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline float from_f16(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu;
    uint32_t normal = (magnitude << 13) + (112u << 23); /* the exponent's bias is 127, not 15 */
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t infinite = normal + (112u << 23);
    uint32_t bits = magnitude < 0x0400u ? subnormal : (magnitude >= 0x7c00u ? infinite : normal);
    return float_of(bits | ((uint32_t)(half & 0x8000u) << 16));
}

static inline uint16_t to_f16(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    /* Near 0.5 the unit in the last place of a float is 2^-24, the smallest half: the addition rounds correctly. */
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : (magnitude >= 0x47800000u ? special : normal);
    return (uint16_t)(half | ((bits >> 16) & 0x8000u));
}

#define SAME(x) (x)
#define ADD(a, x) ((a) + (x))
#define MULTIPLY(a, x) ((a) * (x))
#define AND(a, x) ((a) & (x))
#define OR(a, x) ((a) | (x))
#define XOR(a, x) ((a) ^ (x))
/* As in torch, NaN has priority. */
#define LEAST(a, x) ((x) < (a) || (x) != (x) ? (x) : (a))
#define MOST(a, x) ((x) > (a) || (x) != (x) ? (x) : (a))
#define MEAN(a) ((a) / (float)num_sources)
#define MEAN64(a) ((a) / (double)num_sources)
#define WHOLE_MEAN(a) ((a) / num_sources) /* rounded towards zero, as by NCCL */

#define KERNEL(NAME, T, A, LOAD, STORE, FINISH, OP)                                                        \
    FAST static void NAME(T *to, T *copy, const void *const *sources, int num_sources, size_t count) {     \
        A sum[BLOCK];                                                                                      \
        if (num_sources == 2) { /* in one pass: element i of `to` depends on no other one */               \
            const T *first = (const T *)sources[0], *next = (const T *)sources[1];                         \
            _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {                                      \
                A total = LOAD(first[i]), value = LOAD(next[i]);                                           \
                total = (A)OP(total, value);                                                               \
                to[i] = (T)STORE(FINISH(total));                                                           \
            }                                                                                              \
            if (copy) memcpy(copy, to, count * sizeof(T));                                                 \
            return;                                                                                        \
        }                                                                                                  \
        for (size_t start = 0; start < count; start += BLOCK) {                                            \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                 \
            const T *first = (const T *)sources[0] + start;                                                \
            for (size_t i = 0; i < length; i++) sum[i] = LOAD(first[i]);                                   \
            for (int rank = 1; rank < num_sources; rank++) {                                               \
                const T *next = (const T *)sources[rank] + start;                                          \
                for (size_t i = 0; i < length; i++) {                                                      \
                    A value = LOAD(next[i]);                                                               \
                    sum[i] = (A)OP(sum[i], value);                                                         \
                }                                                                                          \
            }                                                                                              \
            /* Only now: `to` may be one of the sources. */                                                \
            for (size_t i = 0; i < length; i++) to[start + i] = (T)STORE(FINISH(sum[i]));                  \
            if (copy) memcpy(copy + start, to + start, length * sizeof(T));                                \
        }                                                                                                  \
    }

#define FLOATS(N, T, A, LOAD, STORE, AVERAGE)            \
    KERNEL(N##_sum, T, A, LOAD, STORE, SAME, ADD)        \
    KERNEL(N##_avg, T, A, LOAD, STORE, AVERAGE, ADD)     \
    KERNEL(N##_prod, T, A, LOAD, STORE, SAME, MULTIPLY)  \
    KERNEL(N##_min, T, A, LOAD, STORE, SAME, LEAST)      \
    KERNEL(N##_max, T, A, LOAD, STORE, SAME, MOST)

#define INTEGERS(N, T)                                   \
    KERNEL(N##_sum, T, T, SAME, SAME, SAME, ADD)         \
    KERNEL(N##_avg, T, T, SAME, SAME, WHOLE_MEAN, ADD)   \
    KERNEL(N##_prod, T, T, SAME, SAME, SAME, MULTIPLY)   \
    KERNEL(N##_min, T, T, SAME, SAME, SAME, LEAST)       \
    KERNEL(N##_max, T, T, SAME, SAME, SAME, MOST)        \
    KERNEL(N##_and, T, T, SAME, SAME, SAME, AND)         \
    KERNEL(N##_or, T, T, SAME, SAME, SAME, OR)           \
    KERNEL(N##_xor, T, T, SAME, SAME, SAME, XOR)

FLOATS(f32, float, float, SAME, SAME, MEAN)
FLOATS(f64, double, double, SAME, SAME, MEAN64)
FLOATS(f16, uint16_t, float, from_f16, to_f16, MEAN)
FLOATS(bf16, uint16_t, float, from_bf16, to_bf16, MEAN)
INTEGERS(i8, int8_t)
INTEGERS(u8, uint8_t)
INTEGERS(i16, int16_t)
INTEGERS(i32, int32_t)
INTEGERS(i64, int64_t)
INTEGERS(u16, uint16_t)
INTEGERS(u32, uint32_t)
INTEGERS(u64, uint64_t)

#define RUN(NAME, T) NAME((T *)to, (T *)copy, sources, num_sources, count)
#define FLOAT_CASE(CODE, N, T)                     \
    case CODE:                                     \
        switch (op) {                              \
            case SUM: RUN(N##_sum, T); break;      \
            case AVG: RUN(N##_avg, T); break;      \
            case PRODUCT: RUN(N##_prod, T); break; \
            case MIN: RUN(N##_min, T); break;      \
            case MAX: RUN(N##_max, T); break;      \
        }                                          \
        break;
#define INTEGER_CASE(CODE, N, T)                   \
    case CODE:                                     \
        switch (op) {                              \
            case SUM: RUN(N##_sum, T); break;      \
            case AVG: RUN(N##_avg, T); break;      \
            case PRODUCT: RUN(N##_prod, T); break; \
            case MIN: RUN(N##_min, T); break;      \
            case MAX: RUN(N##_max, T); break;      \
            case BAND: RUN(N##_and, T); break;     \
            case BOR: RUN(N##_or, T); break;       \
            case BXOR: RUN(N##_xor, T); break;     \
        }                                          \
        break;

void lockstep_reduce(void *first, void *second, const void *const *sources, int num_sources, size_t count, int dtype,
                     int op) {
    void *to = first ? first : second, *copy = first ? second : NULL;
    switch (dtype) {
        FLOAT_CASE(F32, f32, float)
        FLOAT_CASE(F64, f64, double)
        FLOAT_CASE(F16, f16, uint16_t)
        FLOAT_CASE(BF16, bf16, uint16_t)
        INTEGER_CASE(I8, i8, int8_t)
        INTEGER_CASE(U8, u8, uint8_t)
        INTEGER_CASE(I16, i16, int16_t)
        INTEGER_CASE(I32, i32, int32_t)
        INTEGER_CASE(I64, i64, int64_t)
        INTEGER_CASE(U16, u16, uint16_t)
        INTEGER_CASE(U32, u32, uint32_t)
        INTEGER_CASE(U64, u64, uint64_t)
    }
}

FAST static void scale_f32(float *to, const float *from, float factor, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = from[i] * factor;
}

FAST static void scale_f64(double *to, const double *from, double factor, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] = from[i] * factor;
}

static void scale(char *to, const char *from, double factor, size_t count, int dtype) {
    if (factor == 1)
        memcpy(to, from, count * lockstep_element_bytes(dtype));
    else if (dtype == F32)
        scale_f32((float *)to, (const float *)from, (float)factor, count);
    else
        scale_f64((double *)to, (const double *)from, factor, count);
}

/* Whether an element is NaN or infinite: then all bits of its exponent are set. */
FAST static bool is_nonfinite_f32(const uint32_t *elements, size_t count) {
    uint32_t found = 0;
    for (size_t i = 0; i < count; i++) found |= (elements[i] & 0x7f800000u) == 0x7f800000u;
    return found;
}

FAST static bool is_nonfinite_f64(const uint64_t *elements, size_t count) {
    uint64_t found = 0;
    for (size_t i = 0; i < count; i++) found |= (elements[i] & 0x7ff0000000000000u) == 0x7ff0000000000000u;
    return found;
}

static bool is_nonfinite(const char *from, size_t count, int dtype) {
    return dtype == F32 ? is_nonfinite_f32((const uint32_t *)from, count)
                        : is_nonfinite_f64((const uint64_t *)from, count);
}

void lockstep_fill(char *to, Pieces *pieces, size_t start, size_t end, int dtype) {
    size_t width = lockstep_element_bytes(dtype);
    if (start < pieces->offset) pieces->at = pieces->offset = 0;
    while (start < end && pieces->at < pieces->num_pieces) {
        size_t piece_end = pieces->offset + pieces->counts[pieces->at];
        if (start < piece_end) {
            size_t stop = piece_end < end ? piece_end : end;
            if (pieces->nonfinite && stop - start > BLOCK) stop = start + BLOCK; /* checked while it is in the cache */
            const char *from = pieces->pieces[pieces->at] + (start - pieces->offset) * width;
            scale(to + start * width, from, pieces->factor, stop - start, dtype);
            if (pieces->nonfinite && is_nonfinite(from, stop - start, dtype)) *pieces->nonfinite = 1;
            start = stop;
        }
        if (start >= piece_end) pieces->offset = piece_end, pieces->at++;
    }
}
