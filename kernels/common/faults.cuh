// Faults that can be planted on purpose, one a build (-DFUSIONGATE_FAULT=name).
//
// The suite has to catch each of them: a regression test is worth what it catches. An ordinary build plants `none`, and
// every use below is a compile-time constant, so it costs nothing there.
#pragma once

#include <cstdlib>

#ifndef FUSIONGATE_FAULT
#define FUSIONGATE_FAULT none
#endif

namespace fusiongate {

enum class Fault {
  none,
  scale_unrounded,      // 1 + scale stays in fp32
  product_unrounded,    // the product stays in fp32, and is contracted into the sum where the storage type is fp32
  all_fp32,             // no intermediate is rounded
  truncated,            // the result is truncated toward zero
  sign_of_zero_lost,    // -0.0 is stored as +0.0
  nan_swallowed,        // NaN is stored as 0
  overflow_clamped,     // an infinite result is stored as the largest finite number
  flushed_to_zero,      // a subnormal result is stored as 0
  stride_ignored,       // the rows are read as if they were packed
  batch_rows_mixed,     // each batch entry takes its neighbour's rows
  first_row_for_all,    // every batch entry takes the first one's rows
  tail_skipped,         // the last row of each batch entry is not written
  last_tile_skipped,    // the last block does nothing
  nothing_stored,       // the kernel runs and writes nothing
  one_element_off,      // one element a launch is wrong
  norm_unrounded,       // the norm's result stays in fp32
  epsilon_ignored,      // eps is taken as 0
  mean_subtracted,      // LayerNorm's variance instead of the mean square
  reduction_reordered,  // the same sum, the shuffles the other way round
  nan_spread,           // a NaN in one element of a vector spoils its neighbours
  narrow_unrounded,     // product_unrounded, in the loads narrower than 16 bytes only
  rows_downcast,        // fp32 rows are rounded to x's type before they are used
  aborts_when_loaded,   // the library ends the process that loads it
};

template <Fault kFault>
inline constexpr bool planted = Fault::FUSIONGATE_FAULT == kFault;

// Before any function of the library is called: nothing but another process can contain this.
[[maybe_unused]] static const bool loaded = planted<Fault::aborts_when_loaded> ? (std::abort(), true) : true;

}  // namespace fusiongate
