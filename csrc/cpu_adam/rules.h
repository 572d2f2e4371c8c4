// The optimizers: one struct each. A new one is a struct and a line of INFINITY_RULES.
//
// A rule has the number of its moments, and which are sums of `squares`; `derive`, which makes its constants
// of a segment's options (doubles, rounded to float once: `Scalars::x`); and `apply`, the arithmetic of one
// vector of elements: p, the moments m and the gradient g. Before `apply`, `step` (adam_lane.inl) has scaled
// g, added weight decay that is not decoupled, and multiplied p by `decay`. [Note: one rounding per
// operation] holds here, and the references in hardware/adam_reference.py are the same sequences.
//
// Everything is in an unnamed namespace: each file that includes this has its own, for its instruction set.

#pragma once

#include <cmath>

// X(name, struct), in the order of the numbers that Python has for them.
#define INFINITY_RULES(X)   \
  X(adam, AdamRule)         \
  X(plain, PlainRule)       \
  X(momentum, MomentumRule) \
  X(lion, LionRule)         \
  X(adagrad, AdagradRule)

namespace infinity {

enum class Rule : int32_t {
#define INFINITY_NAME(name, type) name,
  INFINITY_RULES(INFINITY_NAME)
#undef INFINITY_NAME
};

namespace {

inline bool is_beta(double x) { return x >= 0.0 && x < 1.0; }

// torch.optim.AdamW and Adam. Options: beta1, beta2, eps; flag: decoupled weight decay.
struct AdamRule {
  static constexpr int moments = 2;
  static constexpr bool squares[2] = {false, true};
  static bool is_valid(const Segment& s) { return is_beta(s.a) && is_beta(s.b); }
  static bool is_decoupled(const Segment& s) { return s.flag; }
  static void derive(const Segment& s, Scalars& r) {
    const float weight = static_cast<float>(1.0 - s.a);
    const double step = static_cast<double>(s.step);
    r.flag = !(weight < 0.5f);  // torch's lerp starts from the gradient then
    r.x[0] = r.flag ? -(1.0f - weight) : weight;
    r.x[1] = static_cast<float>(s.b);
    r.x[2] = static_cast<float>(1.0 - s.b);
    r.x[3] = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(s.b, step)));
    r.x[4] = static_cast<float>(s.c);
    r.x[5] = static_cast<float>(-(s.lr / (1.0 - std::pow(s.a, step))));
  }
  template <class L, class C>
  static inline void apply(typename L::F& p, typename L::F* m, typename L::F g, const C& c) {
    typename L::F way = L::mul(L::sub(g, m[0]), c.x[0]);
    m[0] = L::add(c.flag ? g : m[0], way);
    m[1] = L::add(L::mul(m[1], c.x[1]), L::mul(L::mul(g, c.x[2]), g));
    typename L::F d = L::add(L::mul(L::sqrt(m[1]), c.x[3]), c.x[4]);
    p = L::add(p, L::div(L::mul(m[0], c.x[5]), d));
  }
};

// torch.optim.SGD without a buffer. Options: as of SGD; they have no momentum.
struct PlainRule {
  static constexpr int moments = 0;
  static constexpr bool squares[2] = {};
  static bool is_valid(const Segment&) { return true; }
  static bool is_decoupled(const Segment&) { return false; }
  static void derive(const Segment& s, Scalars& r) { r.x[0] = static_cast<float>(-s.lr); }
  template <class L, class C>
  static inline void apply(typename L::F& p, typename L::F*, typename L::F g, const C& c) {
    p = L::add(p, L::mul(g, c.x[0]));
  }
};

// torch.optim.SGD. Options: momentum, dampening; flag: nesterov. A group without a momentum leaves the buffer
// as it is.
struct MomentumRule {
  static constexpr int moments = 1;
  static constexpr bool squares[2] = {};
  static bool is_valid(const Segment&) { return true; }
  static bool is_decoupled(const Segment&) { return false; }
  static void derive(const Segment& s, Scalars& r) {
    r.flag = s.flag;
    r.x[0] = static_cast<float>(-s.lr);
    r.x[1] = static_cast<float>(s.a);
    r.x[2] = static_cast<float>(s.step == 1 ? 1.0 : 1.0 - s.b);  // torch's first step is not dampened
  }
  template <class L, class C>
  static inline void apply(typename L::F& p, typename L::F* m, typename L::F g, const C& c) {
    if (c.moves) {
      m[0] = L::add(L::mul(m[0], c.x[1]), L::mul(g, c.x[2]));
      g = c.flag ? L::add(g, L::mul(m[0], c.x[1])) : m[0];
    }
    p = L::add(p, L::mul(g, c.x[0]));
  }
};

// Lion (arXiv 2302.06675, algorithm 2). Options: beta1, beta2.
struct LionRule {
  static constexpr int moments = 1;
  static constexpr bool squares[2] = {};
  static bool is_valid(const Segment& s) { return is_beta(s.a) && is_beta(s.b); }
  static bool is_decoupled(const Segment&) { return true; }
  static void derive(const Segment& s, Scalars& r) {
    r.x[0] = static_cast<float>(-s.lr);
    r.x[1] = static_cast<float>(s.a);
    r.x[2] = static_cast<float>(1.0 - s.a);
    r.x[3] = static_cast<float>(s.b);
    r.x[4] = static_cast<float>(1.0 - s.b);
  }
  template <class L, class C>
  static inline void apply(typename L::F& p, typename L::F* m, typename L::F g, const C& c) {
    typename L::F u = L::add(L::mul(m[0], c.x[1]), L::mul(g, c.x[2]));
    p = L::add(p, L::sign(u, c.x[0]));
    m[0] = L::add(L::mul(m[0], c.x[3]), L::mul(g, c.x[4]));
  }
};

// torch.optim.Adagrad. Options: lr_decay, eps.
struct AdagradRule {
  static constexpr int moments = 1;
  static constexpr bool squares[2] = {true};
  static bool is_valid(const Segment&) { return true; }
  static bool is_decoupled(const Segment&) { return false; }
  static void derive(const Segment& s, Scalars& r) {
    r.x[0] = static_cast<float>(-(s.lr / (1.0 + (static_cast<double>(s.step) - 1.0) * s.a)));
    r.x[1] = static_cast<float>(s.b);
  }
  template <class L, class C>
  static inline void apply(typename L::F& p, typename L::F* m, typename L::F g, const C& c) {
    m[0] = L::add(m[0], L::mul(g, g));
    p = L::add(p, L::div(L::mul(g, c.x[0]), L::add(L::sqrt(m[0]), c.x[1])));
  }
};

}  // namespace
}  // namespace infinity
