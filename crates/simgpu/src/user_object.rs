//! User objects: something of the program that graphs hold and that is destroyed with the last of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::graph::find;
use crate::handles::{Table, fresh};
use crate::process::lock;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which must be given; and `CU_GRAPH_USER_OBJECT_MOVE`.
const NO_DESTRUCTOR_SYNC: u32 = 1;
const MOVE: u32 = 1;

#[derive(Debug)]
struct UserObject {
    destroy: CUhostFn,
    data: usize,
    count: Mutex<u64>,
}

static OBJECTS: OnceLock<Table<UserObject>> = OnceLock::new();

fn objects() -> &'static Table<UserObject> {
    OBJECTS.get_or_init(Table::default)
}

/// The references that a graph, or what was made of it, holds. They are given back when this goes.
#[derive(Debug, Default)]
pub(crate) struct Held(Mutex<BTreeMap<usize, u64>>);

impl Held {
    /// The same references once more, for a copy.
    pub(crate) fn again(&self) -> Self {
        let held = lock(&self.0).clone();
        for (handle, count) in &held {
            let _ = retain(*handle, *count);
        }
        Self(Mutex::new(held))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for (handle, count) in std::mem::take(&mut *lock(&self.0)) {
            let _ = release(handle, count);
        }
    }
}

fn get(handle: usize) -> Result<Arc<UserObject>, CUresult> {
    objects().get(handle).ok_or(INVALID)
}

fn retain(handle: usize, count: u64) -> R {
    *lock(&get(handle)?.count) += count;
    Ok(())
}

fn release(handle: usize, count: u64) -> R {
    let object = get(handle)?;
    {
        let mut left = lock(&object.count);
        *left = left.checked_sub(count).ok_or(INVALID)?;
        if *left > 0 {
            return Ok(());
        }
    }
    if objects().remove(handle).is_some()
        && let Some(destroy) = object.destroy
    {
        // SAFETY: the program gave the function and its argument for this one call, which may be on any thread.
        unsafe { destroy(object.data as *mut c_void) };
    }
    Ok(())
}

pub(crate) fn cuUserObjectCreate(
    c: &Caller,
    object_out: *mut CUuserObject,
    ptr: *mut c_void,
    destroy: CUhostFn,
    initialRefcount: u32,
    flags: u32,
) -> R {
    if object_out.is_null() || destroy.is_none() || initialRefcount == 0 || flags != NO_DESTRUCTOR_SYNC {
        return Err(INVALID);
    }
    let handle = fresh();
    objects().insert(
        handle,
        Arc::new(UserObject {
            destroy,
            data: ptr as usize,
            count: Mutex::new(u64::from(initialRefcount)),
        }),
    );
    c.put(object_out, CUuserObject(handle))
}

pub(crate) fn cuUserObjectRetain(_: &Caller, object: CUuserObject, count: u32) -> R {
    if count == 0 {
        return Err(INVALID);
    }
    retain(object.0, u64::from(count))
}

pub(crate) fn cuUserObjectRelease(_: &Caller, object: CUuserObject, count: u32) -> R {
    if count == 0 {
        return Err(INVALID);
    }
    release(object.0, u64::from(count))
}

pub(crate) fn cuGraphRetainUserObject(
    _: &Caller,
    graph: CUgraph,
    object: CUuserObject,
    count: u32,
    flags: u32,
) -> R {
    let graph = find(graph)?;
    if count == 0 || flags & !MOVE != 0 {
        return Err(INVALID);
    }
    get(object.0)?;
    if flags != MOVE {
        retain(object.0, u64::from(count))?;
    }
    *lock(&graph.held.0).entry(object.0).or_default() += u64::from(count);
    Ok(())
}

pub(crate) fn cuGraphReleaseUserObject(_: &Caller, graph: CUgraph, object: CUuserObject, count: u32) -> R {
    let graph = find(graph)?;
    {
        let mut held = lock(&graph.held.0);
        let here = held.get_mut(&object.0).ok_or(INVALID)?;
        *here = here
            .checked_sub(u64::from(count))
            .filter(|_| count > 0)
            .ok_or(INVALID)?;
        if *here == 0 {
            held.remove(&object.0);
        }
    }
    release(object.0, u64::from(count))
}
