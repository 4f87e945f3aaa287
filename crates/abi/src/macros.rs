//! How the tables of this crate become types.

/// A value of every type here that is all zero bytes: null handles, null pointers, no flags.
///
/// The driver's calls take zero-initialised structures, so every structure has one, without `unsafe`.
pub trait Zero {
    /// The value whose bytes are all zero.
    const ZERO: Self;
}

macro_rules! zero_integers {
    ($($ty:ty)*) => { $(impl Zero for $ty { const ZERO: Self = 0; })* };
}
zero_integers!(u8 u16 u32 u64 usize i8 i16 i32 i64);

impl Zero for f32 {
    const ZERO: Self = 0.0;
}
impl<T> Zero for *mut T {
    const ZERO: Self = core::ptr::null_mut();
}
impl<T> Zero for *const T {
    const ZERO: Self = core::ptr::null();
}
impl<T> Zero for Option<T> {
    // Only used for function pointers, whose `None` is the null pointer.
    const ZERO: Self = None;
}
impl<T: Zero, const N: usize> Zero for [T; N] {
    const ZERO: Self = [T::ZERO; N];
}

/// Handles and other transparent integers.
macro_rules! driver_newtype {
    ($($(#[$meta:meta])* $name:ident: $repr:ty;)*) => {$(
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub $repr);

        impl $name {
            /// The null value.
            pub const NULL: Self = Self(0);

            /// Whether this is the null value.
            #[must_use]
            pub const fn is_null(self) -> bool {
                self.0 == 0
            }
        }

        impl $crate::Zero for $name {
            const ZERO: Self = Self(0);
        }
    )*};
}

/// The driver's enumerations: a newtype over `u32`, because a newer driver's value is legal, and one constant per name.
macro_rules! driver_enum {
    ($($name:ident { $($value:ident = $number:literal,)* })*) => {$(
        #[doc = concat!("The driver's `", stringify!($name), "`.")]
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub u32);

        impl $crate::Zero for $name {
            const ZERO: Self = Self(0);
        }

        $(pub const $value: $name = $name($number);)*
    )*};
}

/// The driver's structures: `Name [size, align] { @offset field: type, }`, each figure checked at compile time.
macro_rules! driver_struct {
    ($($name:ident [$size:literal, $align:literal] { $(@ $offset:literal $field:ident: $ty:ty,)* })*) => {$(
        #[doc = concat!("The driver's `", stringify!($name), "`.")]
        #[repr(C, align($align))]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $(pub $field: $ty,)*
        }

        const _: () = {
            assert!(core::mem::size_of::<$name>() == $size);
            assert!(core::mem::align_of::<$name>() == $align);
            $(assert!(core::mem::offset_of!($name, $field) == $offset);)*
        };

        impl $crate::Zero for $name {
            const ZERO: Self = Self { $($field: <$ty as $crate::Zero>::ZERO,)* };
        }

        impl Default for $name {
            fn default() -> Self {
                <Self as $crate::Zero>::ZERO
            }
        }
    )*};
}

pub(crate) use {driver_enum, driver_newtype, driver_struct};
