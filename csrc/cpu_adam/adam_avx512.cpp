// Sixteen floats side by side. Compiled with -mavx512{f,bw,dq,vl}; called only where all exist.

#include "adam.h"
#include "rules.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
// gcc 12's own header warns of the undefined value that its intrinsics begin with.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

namespace infinity {
namespace avx512 {
namespace {

struct Bf16;
struct F16;

struct Vector {
  static constexpr int width = 16;
  using F = __m512;
  using D = __m512d;
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load(const Bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half(p)), 16));
  }
  static F load(const F16* p) { return _mm512_cvtph_ps(half(p)); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store(Bf16* p, F x) { put(p, bf16(x)); }
  static void store(F16* p, F x) { put(p, f16(x)); }
  static void stream(float* p, F x, F y) {
    _mm512_stream_ps(p, x);
    _mm512_stream_ps(p + width, y);
  }
  static void stream(Bf16* p, F x, F y) { put_past(p, bf16(x), bf16(y)); }
  static void stream(F16* p, F x, F y) { put_past(p, f16(x), f16(y)); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static constexpr int doubles = 2;
  static void widen(F x, D* d) {
    d[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    d[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  }
  static D dadd(D a, D b) { return _mm512_add_pd(a, b); }
  static D dmul(D a, D b) { return _mm512_mul_pd(a, b); }
  static D dset(double x) { return _mm512_set1_pd(x); }
  static F narrow(const D* d) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(d[0])), _mm512_cvtpd_ps(d[1]), 1);
  }
  static void dstore(double* p, D a) { _mm512_storeu_pd(p, a); }
  static void fence() { _mm_sfence(); }
  static F sign(F x, F size) {
    F bit = _mm512_set1_ps(-0.0f);
    __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    return _mm512_mask_xor_ps(_mm512_and_ps(size, bit), some, size, _mm512_and_ps(x, bit));
  }
  using U = __m512i;
  static U uset(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static U count() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
  static U uadd(U a, U b) { return _mm512_add_epi32(a, b); }
  static U umul(U a, U b) { return _mm512_mullo_epi32(a, b); }
  static U uxor(U a, U b) { return _mm512_xor_si512(a, b); }
  template <int n>
  static U down(U a) {
    return _mm512_srli_epi32(a, n);
  }
  template <int n>
  static U up(U a) {
    return _mm512_slli_epi32(a, n);
  }
  static U low16(U a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xffff)); }
  static U uand(U a, U b) { return _mm512_and_si512(a, b); }
  static U uor(U a, U b) { return _mm512_or_si512(a, b); }
  static U usub(U a, U b) { return _mm512_sub_epi32(a, b); }
  static U imin(U a, U b) { return _mm512_min_epi32(a, b); }
  static U imax(U a, U b) { return _mm512_max_epi32(a, b); }
  static U where_not_zero(U a, U b) { return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(a, a), b); }
  static U bits(F x) { return _mm512_castps_si512(x); }
  static F floats(U a) { return _mm512_castsi512_ps(a); }
  static void ustore(uint32_t* p, U a) { _mm512_storeu_si512(p, a); }
  static U load_codes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_codes(uint8_t* p, U a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
  static void store_upper(uint16_t* p, U a) { put(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16))); }
  static void store_rounded(float* p, F x, U) { store(p, x); }
  static void store_rounded(Bf16* p, F x, U below) {
    __m512i sum = _mm512_add_epi32(_mm512_castps_si512(x), below);
    sum = _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(-1));
    put(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
  }

 private:
  static __m256i half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void put(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static void put_past(void* p, __m256i x, __m256i y) {
    _mm512_stream_si512(static_cast<__m512i*>(p), _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1));
  }
  // To nearest, ties to even, with integers: vcvtneps2bf16 would flush subnormals.
  static __m256i bf16(F x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    sum = _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(-1));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
  }
  static __m256i f16(F x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

#include "adam_lane.inl"

const Kernels kKernels = {"avx512", update_any, traffic_any, sum_any, accumulate_any, convert_any};

}  // namespace
}  // namespace avx512

const Kernels* avx512_kernels() { return &avx512::kKernels; }

}  // namespace infinity
#else
namespace infinity {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace infinity
#endif
