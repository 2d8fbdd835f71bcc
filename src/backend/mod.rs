//! Where the arithmetic over whole tensors runs.
