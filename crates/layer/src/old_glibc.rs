//! Two functions that C libraries before 2.33 do not export, and that `std` calls: forwarded to what they have instead.
//!
//! Hidden: nobody outside this library sees them. Newer C libraries still have the old entry points.

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".text",
    ".globl stat64",
    ".hidden stat64",
    ".type stat64, @function",
    "stat64:",
    "mov rdx, rsi",
    "mov rsi, rdi",
    "mov edi, 1",
    "jmp __xstat64@PLT",
    ".globl fstat64",
    ".hidden fstat64",
    ".type fstat64, @function",
    "fstat64:",
    "mov rdx, rsi",
    "mov esi, edi",
    "mov edi, 1",
    "jmp __fxstat64@PLT",
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".text",
    ".globl stat64",
    ".hidden stat64",
    ".type stat64, %function",
    "stat64:",
    "mov x2, x1",
    "mov x1, x0",
    "mov w0, #0",
    "b __xstat64",
    ".globl fstat64",
    ".hidden fstat64",
    ".type fstat64, %function",
    "fstat64:",
    "mov x2, x1",
    "mov w1, w0",
    "mov w0, #0",
    "b __fxstat64",
);
