//! Numbers that kernels and host have to agree on, where neither can take them from the other.
