//! Versions, error names, and profiling, which does nothing here.

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context;

/// The version that the simulated driver claims to be.
const VERSION: i32 = 13000;

pub(crate) fn cuDriverGetVersion(c: &Caller, driverVersion: *mut i32) -> R {
    c.put(driverVersion, VERSION)
}

pub(crate) fn cuGetErrorName(c: &Caller, error: CUresult, pStr: *mut *const c_char) -> R {
    let name = error.c_name();
    c.put(pStr, name.map_or(std::ptr::null(), |name| name.as_ptr()))?;
    name.map(drop).ok_or(CUresult::ERROR_INVALID_VALUE)
}

pub(crate) fn cuGetErrorString(c: &Caller, error: CUresult, pStr: *mut *const c_char) -> R {
    let text = error.c_text();
    c.put(pStr, text.map_or(std::ptr::null(), |text| text.as_ptr()))?;
    text.map(drop).ok_or(CUresult::ERROR_INVALID_VALUE)
}

/// The private tables of the real driver: there are none.
pub(crate) fn cuGetExportTable(
    c: &Caller,
    ppExportTable: *mut *const c_void,
    pExportTableId: *const CUuuid,
) -> R {
    c.get(pExportTableId)?;
    c.put(ppExportTable, std::ptr::null())?;
    Err(CUresult::ERROR_NOT_FOUND)
}

pub(crate) fn cuProfilerStart(_: &Caller) -> R {
    context::current().map(drop)
}

pub(crate) fn cuProfilerStop(_: &Caller) -> R {
    context::current().map(drop)
}
