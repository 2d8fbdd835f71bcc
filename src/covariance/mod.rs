//! Covariance models and their step sizes.
