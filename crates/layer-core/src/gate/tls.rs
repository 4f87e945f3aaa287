//! The thread's own words: where its slots are, one word for each kind of gate ([`super::Gate`]).
//!
//! Words in initial-exec thread-local storage, read with two instructions. `thread_local!` costs about 2 ns more in a
//! shared library, because it calls `__tls_get_addr`; other architectures than the two below use it all the same.
//! They are hidden: they join whatever library or test links this crate, and nobody outside sees it.

#![allow(unsafe_code)]

use std::sync::OnceLock;

use super::slots::Slot;

/// How many kinds of gate there are.
const KINDS: usize = 2;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod word {
    use super::Slot;

    #[cfg(target_arch = "x86_64")]
    core::arch::global_asm!(
        ".section .tbss,\"awT\",@nobits",
        ".globl ebb_gate_word",
        ".hidden ebb_gate_word",
        ".type ebb_gate_word, @object",
        ".size ebb_gate_word, 16",
        ".p2align 3",
        "ebb_gate_word:",
        ".zero 16",
        ".text",
    );

    #[cfg(target_arch = "aarch64")]
    core::arch::global_asm!(
        ".section .tbss,\"awT\",%nobits",
        ".globl ebb_gate_word",
        ".hidden ebb_gate_word",
        ".type ebb_gate_word, %object",
        ".size ebb_gate_word, 16",
        ".p2align 3",
        "ebb_gate_word:",
        ".zero 16",
        ".text",
    );

    /// The address of the calling thread's first word; the second lies behind it.
    #[inline(always)]
    fn address() -> *mut *const Slot {
        let address: *mut *const Slot;
        #[cfg(target_arch = "x86_64")]
        // SAFETY: reads the word's offset from the thread pointer out of the global offset table and the thread
        // pointer out of `fs:0`, as the x86-64 TLS ABI lays down; touches no other memory, flags or stack.
        // Both are the same for a thread's whole life, so that `pure` holds. (The addition changes flags: not preserved.)
        unsafe {
            core::arch::asm!(
                "mov {a}, qword ptr fs:[0]",
                "add {a}, qword ptr [rip + ebb_gate_word@GOTTPOFF]",
                a = out(reg) address,
                options(pure, nomem, nostack),
            );
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above, by the AArch64 TLS ABI: thread pointer in TPIDR_EL0, offset from the global offset table.
        unsafe {
            core::arch::asm!(
                "mrs {a}, tpidr_el0",
                "adrp {t}, :gottprel:ebb_gate_word",
                "ldr {t}, [{t}, :gottprel_lo12:ebb_gate_word]",
                "add {a}, {a}, {t}",
                a = out(reg) address,
                t = out(reg) _,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        address
    }

    #[inline(always)]
    pub(super) fn get<const KIND: usize>() -> *const Slot {
        const { assert!(KIND < super::KINDS) };
        // SAFETY: the address of one of two aligned, zero-initialised words that live as long as the thread and that only
        // this thread, through this module, reads or writes.
        unsafe { address().add(KIND).read() }
    }

    pub(super) fn set<const KIND: usize>(slot: *const Slot) {
        const { assert!(KIND < super::KINDS) };
        // SAFETY: as in `get`; no reference to the words exists.
        unsafe { address().add(KIND).write(slot) }
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod word {
    use super::Slot;
    use std::cell::Cell;

    thread_local! {
        static WORDS: [Cell<*const Slot>; super::KINDS] = const { [const { Cell::new(core::ptr::null()) }; super::KINDS] };
    }

    #[inline(always)]
    pub(super) fn get<const KIND: usize>() -> *const Slot {
        WORDS.with(|words| words[KIND].get())
    }

    pub(super) fn set<const KIND: usize>(slot: *const Slot) {
        WORDS.with(|words| words[KIND].set(slot));
    }
}

/// The slot that the calling thread took last at a gate of that kind.
#[inline(always)]
pub(super) fn head<const KIND: usize>() -> Option<&'static Slot> {
    // SAFETY: the word is null or was written by `set_head`, which takes a reference that lives for ever.
    unsafe { word::get::<KIND>().as_ref() }
}

/// Makes a slot the one that [`head`] answers.
pub(super) fn set_head<const KIND: usize>(slot: Option<&'static Slot>) {
    word::set::<KIND>(slot.map_or(core::ptr::null(), core::ptr::from_ref));
}

/// Sees to it that the thread's slots are given back when it ends, however it ends.
///
/// A plain pthread key, not a Rust thread-local with a destructor: the latter needs a symbol that old C libraries lack,
/// and it isn't run for a thread that a driver ends by force.
pub(super) fn on_thread_exit() {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();

    unsafe extern "C" fn ended(_: *mut libc::c_void) {
        Slot::release_all(head::<0>());
        set_head::<0>(None);
        Slot::release_all(head::<1>());
        set_head::<1>(None);
    }

    let key = KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: a valid place for the key and a destructor of the right signature, which never unwinds
        // (it only stores to atomics) and stays loaded: the library is linked with `-z nodelete`.
        let made = unsafe { libc::pthread_key_create(&raw mut key, Some(ended)) };
        (made == 0).then_some(key)
    });
    if let Some(key) = key {
        // The destructor runs for a value that isn't null. It may run again if another destructor enters the gate after it.
        let some = core::ptr::without_provenance_mut::<libc::c_void>(1);
        // SAFETY: the key is valid and never deleted. The value is never dereferenced.
        let _ = unsafe { libc::pthread_setspecific(*key, some) };
    }
}
