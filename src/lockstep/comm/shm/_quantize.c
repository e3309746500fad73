/* Blocks of numbers as integers of 8 or 4 bits and one scale, for gradients sent between machines. */
#include <string.h>

#include "_shm.h"

#define LARGEST_BLOCK 1024
/* 1.5 * 2^23. The unit in the last place of a float near it is 1: adding it rounds to the nearest integer, ties to
   even, and the low bits of the sum are that integer. */
#define ROUNDING 12582912.0f
#define NOT_FINITE 0x7fc0u       /* as a bfloat16 */
#define TOO_LARGE 0x7f000000u    /* 2^127: the decoded number could be infinite */
#define TOO_SMALL 0x0d800000u    /* 2^-100: the inverse of a scale could be infinite; the block is sent as zeros */

/* The scale is a bfloat16, rounded up, so that no integer is larger than `levels`. */
static inline uint32_t scale_of(uint32_t largest, float levels) {
    if (largest >= TOO_LARGE) return NOT_FINITE;
    return largest < TOO_SMALL ? 0 : (bits_of(float_of(largest) / levels) + 0xffffu) >> 16;
}

/* In a block of 4 bits a byte holds an element of the first half and one of the second. */
static inline size_t code_bytes(size_t length, int bits) { return bits == 8 ? length : (length + 1) / 2; }

/* Replaces `values` by the rounding errors; a block with a value that is not finite becomes zeros. */
FAST void lockstep_encode(float *values, size_t count, int bits, size_t block, uint8_t *scales, uint8_t *codes) {
    uint32_t code[LARGEST_BLOCK];
    float levels = bits == 8 ? 127.0f : 7.0f;
    for (size_t start = 0; start < count; start += block) {
        size_t length = count - start < block ? count - start : block, half = (length + 1) / 2;
        float *value = values + start;
        uint32_t largest = 0;
        for (size_t i = 0; i < length; i++) {
            uint32_t magnitude = bits_of(value[i]) & 0x7fffffffu; /* ordered as the floats are; NaN above all */
            largest = magnitude > largest ? magnitude : largest;
        }
        uint32_t scale = scale_of(largest, levels);
        scales[0] = (uint8_t)scale, scales[1] = (uint8_t)(scale >> 8);
        scales += 2;
        if (scale == NOT_FINITE) memset(value, 0, length * sizeof *value);
        float step = scale == NOT_FINITE ? 0.0f : float_of(scale << 16), inverse = step > 0.0f ? 1.0f / step : 0.0f;
        for (size_t i = 0; i < length; i++) {
            float rounded = value[i] * inverse + ROUNDING;
            code[i] = bits_of(rounded);
            value[i] -= (rounded - ROUNDING) * step;
        }
        if (bits == 8) {
            for (size_t i = 0; i < length; i++) codes[i] = (uint8_t)code[i];
        } else {
            if (length % 2) code[length] = 0;
            for (size_t i = 0; i < half; i++) codes[i] = (uint8_t)((code[i] & 15u) | (code[i + half] << 4));
        }
        codes += code_bytes(length, bits);
    }
}

/* Decodes the result of `lockstep_encode` and writes it to `to`, or adds it. */
FAST void lockstep_decode(const uint8_t *scales, const uint8_t *codes, size_t count, int bits, size_t block, float *to,
                          int adds) {
    float part[LARGEST_BLOCK + 1];
    for (size_t start = 0; start < count; start += block) {
        size_t length = count - start < block ? count - start : block, half = (length + 1) / 2;
        float step = float_of(((uint32_t)scales[0] | (uint32_t)scales[1] << 8) << 16);
        scales += 2;
        if (bits == 8) {
            for (size_t i = 0; i < length; i++) part[i] = (float)(int8_t)codes[i] * step;
        } else {
            for (size_t i = 0; i < half; i++) part[i] = (float)(((int32_t)(codes[i] & 15) ^ 8) - 8) * step;
            for (size_t i = 0; i < half; i++) part[half + i] = (float)(((int32_t)(codes[i] >> 4) ^ 8) - 8) * step;
        }
        codes += code_bytes(length, bits);
        if (adds)
            for (size_t i = 0; i < length; i++) to[start + i] += part[i];
        else
            memcpy(to + start, part, length * sizeof *to);
    }
}
