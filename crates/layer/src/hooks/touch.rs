//! Hooks of everything that may touch memory, generated from the list of functions.

use ebb_abi::*;

use crate::symbols::hook_item;

macro_rules! items {
    ($($name:ident $parameters:tt;)*) => { $(hook_item! { $name $parameters })* };
}
ebb_abi::for_each_driver_function!(items);
