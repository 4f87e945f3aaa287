//! `cuGetProcAddress`: functions by name, version and kind of default stream.

use std::collections::HashMap;
use std::sync::OnceLock;

use ebb_abi::versions::{LookUp, look_up};
use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::export;

fn address_of(symbol: &str) -> Option<usize> {
    static ADDRESSES: OnceLock<HashMap<&'static str, usize>> = OnceLock::new();
    ADDRESSES
        .get_or_init(|| export::symbols().into_iter().collect())
        .get(symbol)
        .copied()
}

fn find(c: &Caller, symbol: *const c_char, version: i32, flags: u64) -> Result<LookUp, CUresult> {
    let name = c.text(symbol)?;
    let (legacy, per_thread) = (
        u64::from(CU_GET_PROC_ADDRESS_LEGACY_STREAM.0),
        u64::from(CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.0),
    );
    if flags & !(legacy | per_thread) != 0 || flags == legacy | per_thread {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    match look_up(name, version, flags == per_thread) {
        LookUp::NotFound => Ok(extra(name).map_or(LookUp::NotFound, LookUp::Symbol)),
        found => Ok(found),
    }
}

/// Functions that are exported but not in the interface's list.
fn extra(name: &str) -> Option<&'static str> {
    export::EXTRA.iter().copied().find(|extra| *extra == name)
}

fn pointer(symbol: &str) -> *mut c_void {
    address_of(symbol).map_or(std::ptr::null_mut(), |address| address as *mut c_void)
}

pub(crate) fn cuGetProcAddress_v2(
    c: &Caller,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cudaVersion: i32,
    flags: u64,
    symbolStatus: *mut CUdriverProcAddressQueryResult,
) -> R {
    let found = find(c, symbol, cudaVersion, flags)?;
    let (address, status) = match found {
        LookUp::Symbol(name) => (pointer(name), CU_GET_PROC_ADDRESS_SUCCESS),
        LookUp::VersionNotSufficient => (std::ptr::null_mut(), CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT),
        LookUp::NotFound => (std::ptr::null_mut(), CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND),
    };
    c.put(pfn, address)?;
    // Who gives a place for the status is told there; who does not gets an error.
    if symbolStatus.is_null() && address.is_null() {
        return Err(CUresult::ERROR_NOT_FOUND);
    }
    c.put_optional(symbolStatus, status);
    Ok(())
}

pub(crate) fn cuGetProcAddress(
    c: &Caller,
    symbol: *const c_char,
    pfn: *mut *mut c_void,
    cudaVersion: i32,
    flags: u64,
) -> R {
    cuGetProcAddress_v2(c, symbol, pfn, cudaVersion, flags, std::ptr::null_mut())
}
