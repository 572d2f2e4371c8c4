// Plain C++: every machine, and the measure of the others.

#include "adam.h"
#include "rules.h"

namespace infinity {
namespace scalar {
namespace {

struct One;
using Vector = One;

#include "adam_lane.inl"

const Kernels kKernels = {"scalar", update_any, traffic_any, sum_any, accumulate_any, convert_any};

}  // namespace
}  // namespace scalar

const Kernels* scalar_kernels() { return &scalar::kKernels; }

}  // namespace infinity
