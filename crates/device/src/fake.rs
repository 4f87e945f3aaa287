//! A GPU's memory that is not there.
