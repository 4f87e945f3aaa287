//! One exported C function for every function of the driver's interface.

#![allow(unreachable_pub, reason = "the symbols are what is public")]

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::entry::{Entry, enter};

macro_rules! export {
    ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {
        /// What functions answer that the simulation does not have.
        #[allow(dead_code, reason = "most have taken their places in `routes`")]
        pub(crate) mod defaults {
            use super::*;
            $(
                pub(crate) fn $name(_: &Caller, $(_: $ty),*) -> R {
                    Err(CUresult::ERROR_NOT_SUPPORTED)
                }
            )*
        }

        $(
            #[doc = concat!("The driver's `", stringify!($name), "`.")]
            ///
            /// # Safety
            /// The arguments are as the driver's interface demands.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($parameter: $ty),*) -> CUresult {
                static ENTRY: Entry = Entry::new(stringify!($name));
                // SAFETY: the program promises what the interface demands.
                unsafe { enter(&ENTRY, |caller| crate::routes::$name(caller, $($parameter),*)) }
            }
        )*

        /// Every exported symbol with its address.
        pub(crate) fn symbols() -> Vec<(&'static str, usize)> {
            let mut all = vec![$((stringify!($name), $name as *const () as usize)),*];
            all.extend(extra_symbols());
            all
        }
    };
}

for_each_driver_function!(export);

/// The profiler's header is not part of the list, but programs look these two up.
macro_rules! export_extra {
    ($($name:ident)*) => {$(
        #[doc = concat!("The driver's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// None is needed.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> CUresult {
            static ENTRY: Entry = Entry::new(stringify!($name));
            // SAFETY: there are no arguments.
            unsafe { enter(&ENTRY, crate::misc::$name) }
        }
    )*

    /// The names of these.
    pub(crate) const EXTRA: &[&str] = &[$(stringify!($name)),*];

    fn extra_symbols() -> Vec<(&'static str, usize)> {
        vec![$((stringify!($name), $name as *const () as usize)),*]
    }
    };
}

export_extra!(cuProfilerStart cuProfilerStop);
