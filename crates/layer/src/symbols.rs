//! The driver's functions: names, hooks and real addresses by number, made from the one list of functions.

use core::ffi::CStr;
use std::sync::atomic::AtomicUsize;

use ebb_abi::*;

use crate::classes::for_each_class;
use crate::library::Hook;

/// Makes `dispatch!`, which turns a function into the item that its treatment asks for.
macro_rules! make_dispatch {
    ($d:tt $( $class:ident $how:ident { $($name:ident)* } )*) => {
        macro_rules! hook_address {
            $($( ($name) => { crate::symbols::$how!($name) }; )*)*
        }
        macro_rules! hook_item {
            $($( ($name $d parameters:tt) => { crate::symbols::$how!($name $d parameters); }; )*)*
        }
    };
}

/// A generated hook: through the gate, call, leave.
macro_rules! gate {
    ($name:ident) => { Hook(crate::hooks::touch::$name as *const ()) };
    ($name:ident ($($parameter:ident: $ty:ty),*)) => {
        crate::symbols::gate! { $name ($($parameter: $ty),*) then core::convert::identity }
    };
    ($name:ident ($($parameter:ident: $ty:ty),*) then $then:expr) => {
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the driver's own")]
        pub(crate) unsafe extern "C-unwind" fn $name($($parameter: $ty),*) -> CUresult {
            #[allow(unused_imports, reason = "not every call says anything")]
            use crate::hooks::needs::{self, Call, Kind, Says as _, SaysNothing as _};
            const KIND: Kind = needs::kind(stringify!($name));
            #[allow(unused_variables, reason = "not every call says anything")]
            let read = move |call: &mut Call<'_>| {
                // SAFETY: the program's own arguments, which the driver is about to read.
                $(unsafe { (&$parameter).tell(call) };)*
            };
            let passage = crate::barrier::enter_for(move || needs::needs(KIND, read));
            if let crate::barrier::Passage::Refused(code) = passage {
                return code;
            }
            let mut instead = None;
            if matches!(KIND, Kind::Addresses | Kind::Anything) && crate::bridge::several() {
                crate::barrier::run(|| needs::note(KIND, read));
                instead = crate::hooks::between::instead!($name ($($parameter),*));
            }
            let result = match instead {
                Some(result) => result,
                // SAFETY: the program's own call, with its own arguments.
                None => unsafe { crate::symbols::raw::$name($($parameter),*) },
            };
            let result = $then(result);
            crate::barrier::leave(passage);
            result
        }
    };
}

/// A generated hook of what is synchronous for memory that wants it so: through the gate, call, wait if need be, leave.
macro_rules! sync {
    ($name:ident) => { Hook(crate::hooks::touch::$name as *const ()) };
    ($name:ident ($($parameter:ident: $ty:ty),*)) => {
        crate::symbols::gate! { $name ($($parameter: $ty),*) then |result| {
            crate::hooks::share::sync::after(result, const { crate::symbols::is_per_thread(stringify!($name)) })
        } }
    };
}

/// Whether a function works on the thread's own default stream.
pub(crate) const fn is_per_thread(name: &str) -> bool {
    matches!(name.as_bytes(), [.., b'_', b'p', b't', b'd', b's'])
}

/// A hook written by hand: here only its signature is checked against the list.
macro_rules! own {
    ($name:ident) => { Hook(crate::hooks::$name as *const ()) };
    ($name:ident ($($parameter:ident: $ty:ty),*)) => {
        const _: unsafe extern "C-unwind" fn($($ty),*) -> CUresult = crate::hooks::$name;
    };
}

/// A generated hook of what does not touch memory: it passes the gate of calls, so that it wakes a process that sleeps.
macro_rules! held {
    ($name:ident) => { Hook(crate::hooks::touch::$name as *const ()) };
    ($name:ident ($($parameter:ident: $ty:ty),*)) => {
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the driver's own")]
        pub(crate) unsafe extern "C-unwind" fn $name($($parameter: $ty),*) -> CUresult {
            // SAFETY: the program's own call, with its own arguments.
            unsafe { crate::symbols::real::$name($($parameter),*) }
        }
    };
}

/// The same for what a checkpoint of the driver does not go past afterwards.
macro_rules! bars {
    ($name:ident) => { Hook(crate::hooks::touch::$name as *const ()) };
    ($name:ident ($($parameter:ident: $ty:ty),*)) => {
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments, reason = "the driver's own")]
        pub(crate) unsafe extern "C-unwind" fn $name($($parameter: $ty),*) -> CUresult {
            // SAFETY: the program's own call, with its own arguments.
            let result = unsafe { crate::symbols::real::$name($($parameter),*) };
            if result.is_success() {
                crate::hooks::with_books(|running| {
                    running.engine.bars_sleep(concat!("it has used ", stringify!($name)));
                    Some(())
                });
            }
            result
        }
    };
}

/// No hook.
macro_rules! pass {
    ($name:ident) => {
        Hook(core::ptr::null())
    };
    ($name:ident $parameters:tt) => {};
}
for_each_class!(make_dispatch);
#[allow(
    clippy::single_component_path_imports,
    reason = "it is how a macro gets a path"
)]
pub(crate) use {bars, gate, held, hook_item, own, pass, sync};

macro_rules! tables {
    ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {
        /// A number for each function.
        #[derive(Clone, Copy, Debug)]
        #[repr(u16)]
        #[allow(dead_code, reason = "most functions are only counted")]
        pub(crate) enum Symbol { $($name),* }

        /// How many functions there are.
        pub(crate) const COUNT: usize = [$(Symbol::$name),*].len();

        /// Their names, sorted.
        pub(crate) static NAMES: &[&CStr] = &[$(
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name holds a zero byte"),
            }
        ),*];

        /// Our functions.
        pub(crate) static HOOKS: &[Hook] = &[$(hook_address!($name)),*];

        /// The real functions, called by name, inside the gate of calls: what hooks call.
        pub(crate) mod real {
            use super::*;
            $(
                /// # Safety
                /// As the driver's function.
                #[inline(always)]
                #[allow(dead_code, clippy::too_many_arguments, reason = "made for every function of the driver")]
                pub(crate) unsafe fn $name($($parameter: $ty),*) -> CUresult {
                    let inside = crate::barrier::call();
                    // SAFETY: this function's contract.
                    let result = unsafe { raw::$name($($parameter),*) };
                    crate::barrier::called(inside);
                    result
                }
            )*
        }

        /// The same past that gate: for who is inside the other one, and for the calls that a checkpoint does not hold back.
        /// Missing ones answer with an error of that call.
        pub(crate) mod raw {
            use super::*;
            $(
                /// # Safety
                /// As the driver's function.
                #[inline(always)]
                #[allow(dead_code, clippy::too_many_arguments, reason = "made for every function of the driver")]
                pub(crate) unsafe fn $name($($parameter: $ty),*) -> CUresult {
                    let address = crate::library::CUDA.real(Symbol::$name as usize);
                    if address == 0 {
                        return MISSING;
                    }
                    // SAFETY: the address of the function of that name, whose signature the list gives. The caller
                    // answers for the arguments.
                    unsafe {
                        let function: unsafe extern "C-unwind" fn($($ty),*) -> CUresult = core::mem::transmute(address);
                        function($($parameter),*)
                    }
                }
            )*
        }
    };
}
ebb_abi::for_each_driver_function!(tables);

/// What a call answers whose function the driver does not have.
const MISSING: CUresult = CUresult::ERROR_NOT_SUPPORTED;

/// Addresses of the real functions, 0 while unknown.
pub(crate) static REAL: &[AtomicUsize] = {
    static CELLS: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];
    &CELLS
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted() {
        assert!(NAMES.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(NAMES.len(), 685);
    }

    #[test]
    fn hooks_are_where_the_table_says() {
        use crate::classes::{How, TABLE};
        for &(name, _, how) in TABLE {
            let name = std::ffi::CString::new(name).unwrap();
            let index = NAMES.binary_search_by(|known| (*known).cmp(&name)).unwrap();
            assert_eq!(HOOKS[index].0.is_null(), how == How::Pass, "{name:?}");
        }
    }
}
