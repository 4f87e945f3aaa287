//! Texture and surface objects: handles that remember what they were made from. No built-in kernel reads through them.

use std::sync::{Arc, OnceLock};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context;
use crate::handles::{Table, fresh};
use crate::memory::array;
use crate::process::process;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;

#[derive(Debug)]
struct Texture {
    resource: CUDA_RESOURCE_DESC,
    texture: CUDA_TEXTURE_DESC,
    view: Option<CUDA_RESOURCE_VIEW_DESC>,
}

static TEXTURES: OnceLock<Table<Texture>> = OnceLock::new();
static SURFACES: OnceLock<Table<CUDA_RESOURCE_DESC>> = OnceLock::new();

fn textures() -> &'static Table<Texture> {
    TEXTURES.get_or_init(Table::default)
}

fn surfaces() -> &'static Table<CUDA_RESOURCE_DESC> {
    SURFACES.get_or_init(Table::default)
}

/// Whether what a description names exists.
fn check(c: &Caller, resource: &CUDA_RESOURCE_DESC) -> R {
    if resource.flags != 0 {
        return Err(INVALID);
    }
    let first = resource.res[0];
    match resource.resType {
        CU_RESOURCE_TYPE_ARRAY => array::find(CUarray(first as usize)).map(drop),
        CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => {
            let mut level = CUarray::NULL;
            array::cuMipmappedArrayGetLevel(c, &mut level, CUmipmappedArray(first as usize), 0)
        }
        CU_RESOURCE_TYPE_LINEAR | CU_RESOURCE_TYPE_PITCH2D => {
            let known = process().memory.read().mapping_at(first).is_some();
            if known && first.is_multiple_of(512) {
                Ok(())
            } else {
                Err(INVALID)
            }
        }
        _ => Err(INVALID),
    }
}

pub(crate) fn cuTexObjectCreate(
    c: &Caller,
    pTexObject: *mut CUtexObject,
    pResDesc: *const CUDA_RESOURCE_DESC,
    pTexDesc: *const CUDA_TEXTURE_DESC,
    pResViewDesc: *const CUDA_RESOURCE_VIEW_DESC,
) -> R {
    context::current()?;
    let resource = c.get(pResDesc)?;
    let texture = c.get(pTexDesc)?;
    let on_array = matches!(
        resource.resType,
        CU_RESOURCE_TYPE_ARRAY | CU_RESOURCE_TYPE_MIPMAPPED_ARRAY
    );
    if pTexObject.is_null() || (!pResViewDesc.is_null() && !on_array) {
        return Err(INVALID);
    }
    check(c, &resource)?;
    let view = if pResViewDesc.is_null() {
        None
    } else {
        Some(c.get(pResViewDesc)?)
    };
    let handle = fresh();
    textures().insert(
        handle,
        Arc::new(Texture {
            resource,
            texture,
            view,
        }),
    );
    c.put(pTexObject, CUtexObject(handle as u64))
}

fn texture(handle: CUtexObject) -> Result<Arc<Texture>, CUresult> {
    textures().get(handle.0 as usize).ok_or(INVALID)
}

pub(crate) fn cuTexObjectDestroy(_: &Caller, texObject: CUtexObject) -> R {
    textures().remove(texObject.0 as usize).map(drop).ok_or(INVALID)
}

pub(crate) fn cuTexObjectGetResourceDesc(
    c: &Caller,
    pResDesc: *mut CUDA_RESOURCE_DESC,
    texObject: CUtexObject,
) -> R {
    c.put(pResDesc, texture(texObject)?.resource)
}

pub(crate) fn cuTexObjectGetTextureDesc(
    c: &Caller,
    pTexDesc: *mut CUDA_TEXTURE_DESC,
    texObject: CUtexObject,
) -> R {
    c.put(pTexDesc, texture(texObject)?.texture)
}

pub(crate) fn cuTexObjectGetResourceViewDesc(
    c: &Caller,
    pResViewDesc: *mut CUDA_RESOURCE_VIEW_DESC,
    texObject: CUtexObject,
) -> R {
    c.put(pResViewDesc, texture(texObject)?.view.ok_or(INVALID)?)
}

pub(crate) fn cuSurfObjectCreate(
    c: &Caller,
    pSurfObject: *mut CUsurfObject,
    pResDesc: *const CUDA_RESOURCE_DESC,
) -> R {
    context::current()?;
    let resource = c.get(pResDesc)?;
    if pSurfObject.is_null() || resource.resType != CU_RESOURCE_TYPE_ARRAY {
        return Err(INVALID);
    }
    check(c, &resource)?;
    let array = array::find(CUarray(resource.res[0] as usize))?;
    if array.descriptor.Flags & CUDA_ARRAY3D_SURFACE_LDST == 0 {
        return Err(INVALID);
    }
    let handle = fresh();
    surfaces().insert(handle, Arc::new(resource));
    c.put(pSurfObject, CUsurfObject(handle as u64))
}

pub(crate) fn cuSurfObjectDestroy(_: &Caller, surfObject: CUsurfObject) -> R {
    surfaces().remove(surfObject.0 as usize).map(drop).ok_or(INVALID)
}

pub(crate) fn cuSurfObjectGetResourceDesc(
    c: &Caller,
    pResDesc: *mut CUDA_RESOURCE_DESC,
    surfObject: CUsurfObject,
) -> R {
    let resource = surfaces().get(surfObject.0 as usize).ok_or(INVALID)?;
    c.put(pResDesc, *resource)
}
