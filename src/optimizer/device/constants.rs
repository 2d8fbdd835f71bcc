//! What covariances and kernels must agree on, and can't take from one another: the compiler compares the
//! two.

use crate::backend::abi;
use crate::covariance::shared;

const _: () = assert!(
    shared::SQRT_3 == abi::RFD_SQRT_3
        && shared::SQRT_5 == abi::RFD_SQRT_5
        && shared::NEWTON_ITERATIONS == abi::RFD_NEWTON_ITERATIONS as usize
        && shared::POINTS_PER_E == abi::RFD_POINTS_PER_E
        && shared::FORCE_EXPONENT == abi::RFD_FORCE_EXPONENT as u64
        && shared::SMALL_FORCE == abi::RFD_SMALL_FORCE
        && shared::MARGIN == abi::RFD_MARGIN
        && shared::SHORTEST == abi::RFD_SHORTEST
        && shared::VANISHED == abi::RFD_VANISHED
        && shared::ROOT_ITERATIONS == abi::RFD_ROOT_ITERATIONS as usize
);
