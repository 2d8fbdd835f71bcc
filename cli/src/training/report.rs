//! stopgap
