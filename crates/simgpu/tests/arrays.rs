//! Arrays, mipmapped arrays, textures and surfaces: what is made, counted, copied and refused.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use std::ptr::{null, null_mut};

use common::*;
use ebb_abi::*;

const INVALID: CUresult = CUresult::ERROR_INVALID_VALUE;
const HANDLE: CUresult = CUresult::ERROR_INVALID_HANDLE;
const SMALL: &[(&str, &str)] = &[("EBB_SIM_MEMORY", "64Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];

fn shape(width: usize, height: usize, depth: usize) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: width,
        Height: height,
        Depth: depth,
        Format: CU_AD_FORMAT_FLOAT,
        NumChannels: 1,
        Flags: 0,
    }
}

fn make(cuda: &Cuda, descriptor: &CUDA_ARRAY3D_DESCRIPTOR) -> Result<CUarray, CUresult> {
    let mut array = CUarray::NULL;
    cuda.cuArray3DCreate_v2(&mut array, descriptor)
        .ok()
        .map(|()| array)
}

#[test]
fn making_and_asking() {
    alone("making_and_asking", SMALL, |cuda| {
        let wanted = shape(1024, 1024, 0);
        let array = make(cuda, &wanted).unwrap();
        assert_eq!(cuda.free_bytes(), 60 * MIB, "four bytes each");
        let mut back = CUDA_ARRAY3D_DESCRIPTOR::default();
        ok(cuda.cuArray3DGetDescriptor_v2(&mut back, array));
        assert_eq!(
            (back.Width, back.Height, back.Format),
            (1024, 1024, CU_AD_FORMAT_FLOAT)
        );
        let mut flat = CUDA_ARRAY_DESCRIPTOR::default();
        ok(cuda.cuArrayGetDescriptor_v2(&mut flat, array));
        assert_eq!((flat.Width, flat.Height, flat.NumChannels), (1024, 1024, 1));
        ok(cuda.cuArrayDestroy(array));
        assert_eq!(cuda.cuArrayDestroy(array), HANDLE);
        assert_eq!(cuda.free_bytes(), 64 * MIB);
        let wrong = |change: &dyn Fn(&mut CUDA_ARRAY3D_DESCRIPTOR)| {
            let mut descriptor = wanted;
            change(&mut descriptor);
            make(cuda, &descriptor).err()
        };
        assert_eq!(wrong(&|d| d.Width = 0), Some(INVALID));
        assert_eq!(wrong(&|d| d.NumChannels = 3), Some(INVALID));
        assert_eq!(wrong(&|d| d.Format = CUarray_format(5)), Some(INVALID));
        assert_eq!(wrong(&|d| (d.Height, d.Depth) = (0, 4)), Some(INVALID));
        assert_eq!(
            wrong(&|d| d.Flags = CUDA_ARRAY3D_LAYERED),
            Some(INVALID),
            "no layers"
        );
        assert_eq!(
            wrong(&|d| (d.Depth, d.Flags) = (5, CUDA_ARRAY3D_CUBEMAP)),
            Some(INVALID)
        );
        assert_eq!(wrong(&|d| d.Flags = 1 << 20), Some(INVALID));
        assert_eq!(
            wrong(&|d| d.Flags = CUDA_ARRAY3D_SPARSE),
            Some(CUresult::ERROR_NOT_SUPPORTED)
        );
        assert_eq!(
            wrong(&|d| (d.Width, d.Height) = (1 << 16, 1 << 16)),
            Some(CUresult::ERROR_OUT_OF_MEMORY)
        );
        // A flat one of one dimension, small: it shares a block.
        let mut small = CUarray::NULL;
        let one = CUDA_ARRAY_DESCRIPTOR {
            Width: 100,
            Height: 0,
            Format: CU_AD_FORMAT_UNSIGNED_INT8,
            NumChannels: 4,
        };
        ok(cuda.cuArrayCreate_v2(&mut small, &one));
        assert_eq!(cuda.free_bytes(), 62 * MIB);
        assert_eq!(cuda.cuArrayCreate_v2(null_mut(), &one), INVALID);
        let mut needs = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
        assert_eq!(
            cuda.cuArrayGetMemoryRequirements(&mut needs, small, CUdevice(0)),
            INVALID,
            "only for deferred mapping"
        );
        // They go with their context.
        ok(cuda.cuDevicePrimaryCtxReset_v2(CUdevice(0)));
        let machine = ebb_simdev::Machine::open_from_env().unwrap();
        assert_eq!(machine.usage(0).used, 0);
    });
}

#[test]
fn copying() {
    alone("copying", SMALL, |cuda| {
        let array = make(cuda, &shape(8, 4, 3)).unwrap();
        let source: Vec<f32> = (0..8 * 4 * 3).map(|index| index as f32).collect();
        let to_array = CUDA_MEMCPY3D {
            srcMemoryType: CU_MEMORYTYPE_HOST,
            srcHost: source.as_ptr().cast(),
            srcPitch: 32,
            srcHeight: 4,
            dstMemoryType: CU_MEMORYTYPE_ARRAY,
            dstArray: array,
            WidthInBytes: 32,
            Height: 4,
            Depth: 3,
            ..CUDA_MEMCPY3D::default()
        };
        ok(cuda.cuMemcpy3D_v2(&to_array));
        // A box out of the middle: two wide, two high, from the last plane.
        let mut seen = [0_f32; 4];
        let from_array = CUDA_MEMCPY3D {
            srcMemoryType: CU_MEMORYTYPE_ARRAY,
            srcArray: array,
            srcXInBytes: 8,
            srcY: 1,
            srcZ: 2,
            dstMemoryType: CU_MEMORYTYPE_HOST,
            dstHost: seen.as_mut_ptr().cast(),
            dstPitch: 8,
            dstHeight: 2,
            WidthInBytes: 8,
            Height: 2,
            Depth: 1,
            ..CUDA_MEMCPY3D::default()
        };
        ok(cuda.cuMemcpy3D_v2(&from_array));
        assert_eq!(seen, [74.0, 75.0, 82.0, 83.0]);
        let mut over = from_array;
        over.srcXInBytes = 28;
        assert_eq!(cuda.cuMemcpy3D_v2(&over), INVALID, "over the end of a row");
        over = from_array;
        over.srcZ = 3;
        assert_eq!(cuda.cuMemcpy3D_v2(&over), INVALID, "no such plane");
        over = from_array;
        over.srcArray = CUarray(5);
        assert_eq!(cuda.cuMemcpy3D_v2(&over), HANDLE);
        // From one array to another, to the device, and lines by the older calls.
        let flat = make(cuda, &shape(8, 4, 0)).unwrap();
        let between = CUDA_MEMCPY2D {
            srcMemoryType: CU_MEMORYTYPE_ARRAY,
            srcArray: array,
            dstMemoryType: CU_MEMORYTYPE_ARRAY,
            dstArray: flat,
            WidthInBytes: 32,
            Height: 4,
            ..CUDA_MEMCPY2D::default()
        };
        ok(cuda.cuMemcpy2D_v2(&between));
        let data = cuda.alloc(64);
        ok(cuda.cuMemcpyAtoD_v2(data, flat, 4, 8));
        ok(cuda.cuMemcpyDtoA_v2(flat, 0, data, 8));
        let mut line = [0_f32; 3];
        ok(cuda.cuMemcpyAtoH_v2(line.as_mut_ptr().cast(), flat, 0, 12));
        assert_eq!(line, [1.0, 2.0, 2.0]);
        ok(cuda.cuMemcpyHtoA_v2(flat, 4, [9_f32].as_ptr().cast(), 4));
        ok(cuda.cuMemcpyAtoA_v2(flat, 8, flat, 4, 4));
        ok(cuda.cuMemcpyAtoH_v2(line.as_mut_ptr().cast(), flat, 0, 12));
        assert_eq!(line, [1.0, 9.0, 9.0]);
        assert_eq!(cuda.cuMemcpyAtoD_v2(data, flat, 28, 8), INVALID);
    });
}

#[test]
fn mipmaps() {
    alone("mipmaps", SMALL, |cuda| {
        let mut mipmap = CUmipmappedArray::NULL;
        ok(cuda.cuMipmappedArrayCreate(&mut mipmap, &shape(16, 8, 0), 99));
        let mut level = CUarray::NULL;
        let mut back = CUDA_ARRAY3D_DESCRIPTOR::default();
        for (index, size) in [(0, (16, 8)), (2, (4, 2)), (4, (1, 1))] {
            ok(cuda.cuMipmappedArrayGetLevel(&mut level, mipmap, index));
            ok(cuda.cuArray3DGetDescriptor_v2(&mut back, level));
            assert_eq!((back.Width, back.Height), size);
        }
        assert_eq!(
            cuda.cuMipmappedArrayGetLevel(&mut level, mipmap, 5),
            INVALID,
            "halved to one"
        );
        ok(cuda.cuMipmappedArrayGetLevel(&mut level, mipmap, 1));
        assert_eq!(cuda.cuArrayDestroy(level), HANDLE, "goes with the whole");
        ok(cuda.cuMipmappedArrayDestroy(mipmap));
        assert_eq!(cuda.cuMipmappedArrayDestroy(mipmap), HANDLE);
        assert_eq!(cuda.cuArray3DGetDescriptor_v2(&mut back, level), HANDLE);
        assert_eq!(
            cuda.cuMipmappedArrayCreate(&mut mipmap, &shape(16, 8, 0), 0),
            INVALID
        );
        assert_eq!(cuda.free_bytes(), 64 * MIB);
    });
}

#[test]
fn deferred_mapping() {
    alone("deferred_mapping", SMALL, |cuda| {
        let mut descriptor = shape(512, 512, 0);
        descriptor.Flags = 0x80;
        let array = make(cuda, &descriptor).unwrap();
        assert_eq!(cuda.free_bytes(), 64 * MIB, "no memory yet");
        let mut needs = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
        ok(cuda.cuArrayGetMemoryRequirements(&mut needs, array, CUdevice(0)));
        assert_eq!(needs.size, 2 * MIB);
        let memory = cuda.create(needs.size);
        let mut info = CUarrayMapInfo {
            resourceType: CU_RESOURCE_TYPE_ARRAY,
            resource: array.0 as u64,
            memOperationType: CU_MEM_OPERATION_TYPE_MAP,
            memHandleType: CU_MEM_HANDLE_TYPE_GENERIC,
            memHandle: memory.0,
            deviceBitMask: 1,
            ..CUarrayMapInfo::default()
        };
        let line = [5_f32; 4];
        let write = || cuda.cuMemcpyHtoA_v2(array, 0, line.as_ptr().cast(), 16);
        assert_eq!(write(), INVALID);
        ok(cuda.cuMemMapArrayAsync(&mut info, 1, NO_STREAM));
        assert_eq!(cuda.cuMemMapArrayAsync(&mut info, 1, NO_STREAM), INVALID, "twice");
        ok(write());
        ok(cuda.cuMemRelease(memory));
        assert_eq!(cuda.free_bytes(), 62 * MIB);
        info.memOperationType = CU_MEM_OPERATION_TYPE_UNMAP;
        info.memHandle = 0;
        ok(cuda.cuMemMapArrayAsync(&mut info, 1, NO_STREAM));
        assert_eq!(cuda.free_bytes(), 64 * MIB);
        ok(cuda.cuArrayDestroy(array));
    });
}

#[test]
fn textures_and_surfaces() {
    alone("textures_and_surfaces", SMALL, |cuda| {
        let mut descriptor = shape(64, 64, 0);
        let plain = make(cuda, &descriptor).unwrap();
        descriptor.Flags = CUDA_ARRAY3D_SURFACE_LDST;
        let writable = make(cuda, &descriptor).unwrap();
        let on = |array: CUarray| {
            let mut resource = CUDA_RESOURCE_DESC {
                resType: CU_RESOURCE_TYPE_ARRAY,
                ..CUDA_RESOURCE_DESC::default()
            };
            resource.res[0] = array.0 as u64;
            resource
        };
        let texture = CUDA_TEXTURE_DESC {
            maxAnisotropy: 7,
            ..CUDA_TEXTURE_DESC::default()
        };
        let mut object = CUtexObject::NULL;
        ok(cuda.cuTexObjectCreate(&mut object, &on(plain), &texture, null()));
        let (mut resource, mut told) = (CUDA_RESOURCE_DESC::default(), CUDA_TEXTURE_DESC::default());
        ok(cuda.cuTexObjectGetResourceDesc(&mut resource, object));
        ok(cuda.cuTexObjectGetTextureDesc(&mut told, object));
        assert_eq!((resource.res[0], told.maxAnisotropy), (plain.0 as u64, 7));
        let mut view = CUDA_RESOURCE_VIEW_DESC::default();
        assert_eq!(
            cuda.cuTexObjectGetResourceViewDesc(&mut view, object),
            INVALID,
            "it has none"
        );
        ok(cuda.cuTexObjectDestroy(object));
        assert_eq!(cuda.cuTexObjectDestroy(object), INVALID);
        assert_eq!(
            cuda.cuTexObjectCreate(&mut object, &on(CUarray(3)), &texture, null()),
            HANDLE
        );
        let mut linear = CUDA_RESOURCE_DESC {
            resType: CU_RESOURCE_TYPE_LINEAR,
            ..CUDA_RESOURCE_DESC::default()
        };
        linear.res[0] = cuda.alloc(4096).0;
        ok(cuda.cuTexObjectCreate(&mut object, &linear, &texture, null()));
        assert_eq!(
            cuda.cuTexObjectCreate(&mut object, &linear, &texture, &view),
            INVALID
        );
        linear.res[0] += 4;
        assert_eq!(
            cuda.cuTexObjectCreate(&mut object, &linear, &texture, null()),
            INVALID,
            "off its place"
        );
        let mut surface = CUsurfObject::NULL;
        assert_eq!(
            cuda.cuSurfObjectCreate(&mut surface, &on(plain)),
            INVALID,
            "not made for it"
        );
        ok(cuda.cuSurfObjectCreate(&mut surface, &on(writable)));
        ok(cuda.cuSurfObjectGetResourceDesc(&mut resource, surface));
        assert_eq!(resource.res[0], writable.0 as u64);
        ok(cuda.cuSurfObjectDestroy(surface));
        assert_eq!(cuda.cuSurfObjectDestroy(surface), INVALID);
    });
}
