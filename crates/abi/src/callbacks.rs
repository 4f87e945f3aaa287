//! Functions of the program that the driver calls, and names that share a type.

#![expect(missing_docs, reason = "the names are the driver's own")]

use core::ffi::{c_char, c_void};

use super::enums::{CUgraphRecaptureStatus, CUlaunchAttributeID, CUlogLevel};
use super::handles::{CUasyncCallbackHandle, CUdevice, CUgraphNode, CUstream};
use super::result::CUresult;
use super::structs_exec::{CUgraphNodeParams, CUlaunchAttributeValue};
use super::structs_other::CUasyncNotificationInfo;

pub type CUasyncCallback =
    Option<unsafe extern "C" fn(*mut CUasyncNotificationInfo, *mut c_void, CUasyncCallbackHandle)>;
pub type CUcoredumpStatusCallback = Option<unsafe extern "C" fn(*mut c_void, i32, CUdevice)>;
pub type CUgraphRecaptureCallback = Option<
    unsafe extern "C" fn(
        *mut c_void,
        CUgraphNode,
        *const CUgraphNodeParams,
        *const CUgraphNodeParams,
        CUgraphRecaptureStatus,
    ) -> CUresult,
>;
pub type CUhostFn = Option<unsafe extern "C" fn(*mut c_void)>;
pub type CUlogsCallback = Option<unsafe extern "C" fn(*mut c_void, CUlogLevel, *mut c_char, usize)>;
pub type CUoccupancyB2DSize = Option<unsafe extern "C" fn(i32) -> usize>;
pub type CUstreamCallback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;
pub type CUkernelNodeAttrID = CUlaunchAttributeID;
pub type CUkernelNodeAttrValue = CUlaunchAttributeValue;
pub type CUstreamAttrID = CUlaunchAttributeID;
pub type CUstreamAttrValue = CUlaunchAttributeValue;
