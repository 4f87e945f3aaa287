//! The engine as a whole, over the fake device and the scripted daemon. Tests that pin a reported fault are named
//! after it.

mod allocating;
mod common;
mod daemon;
mod descriptors;
mod faults;
mod pins;
mod ring;
mod sequences;
mod tier;
