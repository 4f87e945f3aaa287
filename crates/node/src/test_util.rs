//! For tests.
