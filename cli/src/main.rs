//! `rfdescent`: fit covariance models, compute step sizes, plan samples, train networks.

fn main() {}
