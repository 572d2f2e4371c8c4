// Four floats side by side, on 64-bit Arm, every one of which has AdvSIMD: no flags, no run-time check.

#include "adam.h"
#include "rules.h"

#ifdef __AARCH64EL__
#include <arm_neon.h>

namespace infinity {
namespace neon {
namespace {

struct Bf16;
struct F16;

struct Vector {
  static constexpr int width = 4;
  using F = float32x4_t;
  using D = float64x2_t;
  static F set(float x) { return vdupq_n_f32(x); }
  static F load(const float* p) { return vld1q_f32(p); }
  static F load(const Bf16* p) { return floats(vshlq_n_u32(vmovl_u16(half(p)), 16)); }
  static F load(const F16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(half(p))); }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static void store(Bf16* p, F x) { put(p, bf16(x)); }
  static void store(F16* p, F x) { put(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
  // Plain stores: processors notice by themselves that whole lines are written one after another.
  template <class T>
  static void stream(T* p, F x, F y) {
    store(p, x);
    store(p + width, y);
  }
  static void fence() {}
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F sqrt(F a) { return vsqrtq_f32(a); }
  static constexpr int doubles = 2;
  static void widen(F x, D* d) {
    d[0] = vcvt_f64_f32(vget_low_f32(x));
    d[1] = vcvt_high_f64_f32(x);
  }
  static D dadd(D a, D b) { return vaddq_f64(a, b); }
  static D dmul(D a, D b) { return vmulq_f64(a, b); }
  static D dset(double x) { return vdupq_n_f64(x); }
  static F narrow(const D* d) { return vcvt_high_f32_f64(vcvt_f32_f64(d[0]), d[1]); }
  static void dstore(double* p, D a) { vst1q_f64(p, a); }
  using U = uint32x4_t;
  static F sign(F x, F size) {
    U bit = uset(0x80000000u), some = vorrq_u32(vcgtzq_f32(x), vcltzq_f32(x));
    U sized = veorq_u32(bits(size), vandq_u32(bits(x), bit));
    return floats(vbslq_u32(some, sized, vandq_u32(bits(size), bit)));
  }
  static U uset(uint32_t x) { return vdupq_n_u32(x); }
  static U count() { return U{0, 1, 2, 3}; }
  static U uadd(U a, U b) { return vaddq_u32(a, b); }
  static U umul(U a, U b) { return vmulq_u32(a, b); }
  static U uxor(U a, U b) { return veorq_u32(a, b); }
  template <int n>
  static U down(U a) {
    return vshrq_n_u32(a, n);
  }
  template <int n>
  static U up(U a) {
    return vshlq_n_u32(a, n);
  }
  static U low16(U a) { return vandq_u32(a, uset(0xffffu)); }
  static U uand(U a, U b) { return vandq_u32(a, b); }
  static U uor(U a, U b) { return vorrq_u32(a, b); }
  static U usub(U a, U b) { return vsubq_u32(a, b); }
  static U imin(U a, U b) { return vreinterpretq_u32_s32(vminq_s32(number(a), number(b))); }
  static U imax(U a, U b) { return vreinterpretq_u32_s32(vmaxq_s32(number(a), number(b))); }
  static U where_not_zero(U a, U b) { return vbicq_u32(b, vceqzq_u32(a)); }
  static U bits(F x) { return vreinterpretq_u32_f32(x); }
  static F floats(U a) { return vreinterpretq_f32_u32(a); }
  static void ustore(uint32_t* p, U a) { vst1q_u32(p, a); }
  static U load_codes(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
  }
  static void store_codes(uint8_t* p, U a) {
    uint16x4_t halves = vmovn_u32(a);
    uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
    __builtin_memcpy(p, &four, sizeof four);
  }
  static void store_upper(uint16_t* p, U a) { put(p, vshrn_n_u32(a, 16)); }
  static void store_rounded(float* p, F x, U) { store(p, x); }
  static void store_rounded(Bf16* p, F x, U below) { put(p, upper_or_nan(x, vaddq_u32(bits(x), below))); }

 private:
  static int32x4_t number(U a) { return vreinterpretq_s32_u32(a); }
  static uint16x4_t half(const void* p) { return vld1_u16(static_cast<const uint16_t*>(p)); }
  static void put(void* p, uint16x4_t x) { vst1_u16(static_cast<uint16_t*>(p), x); }
  // The upper halves of `sum`, all ones where x is a NaN.
  static uint16x4_t upper_or_nan(F x, U sum) { return vshrn_n_u32(vornq_u32(sum, vceqq_f32(x, x)), 16); }
  // To nearest, ties to even, with integers: not every processor has bfcvt, whose NaNs are others.
  static uint16x4_t bf16(F x) {
    U odd = vandq_u32(vshrq_n_u32(bits(x), 16), uset(1));
    return upper_or_nan(x, vaddq_u32(bits(x), vaddq_u32(odd, uset(0x7fff))));
  }
};

#include "adam_lane.inl"

const Kernels kKernels = {"neon", update_any, traffic_any, sum_any, accumulate_any, convert_any};

}  // namespace
}  // namespace neon

const Kernels* neon_kernels() { return &neon::kKernels; }

}  // namespace infinity
#else
namespace infinity {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace infinity
#endif
