//! Memory that comes with code and with opaque layouts: globals of modules and libraries, arrays.

use std::ffi::CString;

use ebb_abi::*;

use crate::behaviour::Behaviour;
use crate::driver::Driver;
use crate::helpers::*;
use crate::observe::Test;

/// Two variables and a kernel that does nothing.
const TEXT: &str = "\
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 conf_words[300];
.visible .global .align 8 .u64 conf_one;
.visible .entry conf_nothing()
{
    ret;
}
";

#[track_caller]
fn load(cu: Driver) -> CUmodule {
    let text = CString::new(TEXT).expect("no zero byte in it");
    let mut module = CUmodule::NULL;
    must(
        "cuModuleLoadData",
        cu.cuModuleLoadData(&mut module, text.as_ptr().cast()),
    );
    module
}

fn global(cu: Driver, module: CUmodule, name: &std::ffi::CStr) -> Result<(CUdeviceptr, usize), CUresult> {
    let (mut address, mut bytes) = (CUdeviceptr::NULL, 0);
    match cu.cuModuleGetGlobal_v2(&mut address, &mut bytes, module, name.as_ptr()) {
        CUresult::SUCCESS => Ok((address, bytes)),
        code => Err(code),
    }
}

const WORDS: &std::ffi::CStr = c"conf_words";

fn flat(width: usize, height: usize) -> CUDA_ARRAY_DESCRIPTOR {
    CUDA_ARRAY_DESCRIPTOR {
        Width: width,
        Height: height,
        Format: CU_AD_FORMAT_UNSIGNED_INT8,
        NumChannels: 1,
    }
}

fn array(t: &Test, cu: Driver, width: usize, height: usize) -> Result<CUarray, CUresult> {
    let mut array = CUarray::NULL;
    let code = cu.cuArrayCreate_v2(&mut array, &flat(width, height));
    match t.exists("cuArrayCreate", code) {
        CUresult::SUCCESS => Ok(array),
        code => Err(code),
    }
}

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::new(
        "module.global_has_its_size",
        "A module's variable has an address and the size of its type",
        |t, cu| {
            let module = load(cu);
            t.see("words", either(global(cu, module, WORDS).map(|found| found.1)));
            t.see(
                "one",
                either(global(cu, module, c"conf_one").map(|found| found.1)),
            );
            t.see(
                "none",
                either(global(cu, module, c"conf_none").map(|found| found.1)),
            );
        },
    )
    .fact(&["words: 1200", "one: 8", "none: NOT_FOUND"]),
    Behaviour::new(
        "module.global_is_memory",
        "A module's variable starts as zero, is written and read",
        |t, cu| {
            let module = load(cu);
            let (address, bytes) = global(cu, module, WORDS).expect("a variable");
            t.see("at first", compare(&cu.read(address, bytes), &vec![0; bytes]));
            cu.write(address, &pattern(bytes, 3));
            t.see("then", compare(&cu.read(address, bytes), &pattern(bytes, 3)));
        },
    )
    .fact(&["at first: right", "then: right"]),
    Behaviour::new(
        "module.a_kernel_writes_a_global",
        "A kernel of another module writes into the variable",
        |t, cu| {
            let module = load(cu);
            let (address, _) = global(cu, module, WORDS).expect("a variable");
            let touch = cu.kernel("ebb_touch");
            t.code("launch", cu.launch(touch, NO_STREAM, &[address.0, 2, 1]));
            cu.sync();
            t.see("bytes", format!("{:?}", cu.read(address, 9)));
        },
    )
    .fact(&["launch: SUCCESS", "bytes: [1, 0, 0, 0, 1, 0, 0, 0, 0]"]),
    Behaviour::new(
        "module.global_is_not_for_free",
        "A module's variable cannot be freed",
        |t, cu| {
            let module = load(cu);
            let (address, _) = global(cu, module, WORDS).expect("a variable");
            t.code("free", cu.cuMemFree_v2(address));
            cu.write(address, &[1]);
            t.see("byte", cu.read(address, 1)[0]);
        },
    ),
    Behaviour::new(
        "module.two_loads_are_two_variables",
        "Each load of a module has variables of its own",
        |t, cu| {
            let (a, b) = (load(cu), load(cu));
            let (x, _) = global(cu, a, WORDS).expect("a variable");
            let (y, _) = global(cu, b, WORDS).expect("a variable");
            cu.write(x, &[5; 4]);
            t.see("different", x != y);
            t.see("the other", cu.read(y, 1)[0]);
            t.code("unload", cu.cuModuleUnload(a));
            cu.write(y, &[6; 4]);
            t.see("the other", cu.read(y, 1)[0]);
        },
    )
    .fact(&[
        "different: true",
        "the other: 0",
        "unload: SUCCESS",
        "the other: 6",
    ]),
    Behaviour::new(
        "module.one_place_is_enough",
        "cuModuleGetGlobal with a place for the address or the size alone",
        |t, cu| {
            let module = load(cu);
            let (mut address, mut bytes) = (CUdeviceptr::NULL, 0);
            t.code(
                "address",
                cu.cuModuleGetGlobal_v2(&mut address, std::ptr::null_mut(), module, WORDS.as_ptr()),
            );
            t.code(
                "size",
                cu.cuModuleGetGlobal_v2(std::ptr::null_mut(), &mut bytes, module, WORDS.as_ptr()),
            );
            t.see("size", bytes);
        },
    )
    .fact(&["address: SUCCESS", "size: SUCCESS", "size: 1200"]),
    Behaviour::new(
        "module.library_global",
        "A library's variable is found in the current context",
        |t, cu| {
            let text = CString::new(TEXT).expect("no zero byte in it");
            let mut library = CUlibrary::NULL;
            let (none, nulls) = (std::ptr::null_mut(), std::ptr::null_mut());
            let code = cu.cuLibraryLoadData(
                &mut library,
                text.as_ptr().cast(),
                none,
                nulls,
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
            );
            t.code("load", code);
            let (mut address, mut bytes) = (CUdeviceptr::NULL, 0);
            t.code(
                "find",
                cu.cuLibraryGetGlobal(&mut address, &mut bytes, library, WORDS.as_ptr()),
            );
            t.see("size", bytes);
            cu.write(address, &[8]);
            t.see("byte", cu.read(address, 1)[0]);
            t.code("unload", cu.cuLibraryUnload(library));
        },
    )
    .fact(&[
        "load: SUCCESS",
        "find: SUCCESS",
        "size: 1200",
        "byte: 8",
        "unload: SUCCESS",
    ]),
    Behaviour::new(
        "array.whole_life",
        "An array is made, described and destroyed",
        |t, cu| {
            let made = array(t, cu, 64, 32);
            t.see("create", either(made.map(|_| "an array")));
            let Ok(made) = made else { return };
            let mut told = CUDA_ARRAY_DESCRIPTOR::default();
            t.code("describe", cu.cuArrayGetDescriptor_v2(&mut told, made));
            t.see("width", told.Width);
            t.see("height", told.Height);
            t.code("destroy", cu.cuArrayDestroy(made));
        },
    )
    .fact(&[
        "create: \"an array\"",
        "describe: SUCCESS",
        "width: 64",
        "height: 32",
        "destroy: SUCCESS",
    ]),
    Behaviour::new("array.copies", "Rows go into an array and come back", |t, cu| {
        let Ok(made) = array(t, cu, 64, 32) else { return };
        let sent = pattern(64 * 32, 1);
        let down = CUDA_MEMCPY2D {
            srcMemoryType: CU_MEMORYTYPE_HOST,
            srcHost: sent.as_ptr().cast(),
            srcPitch: 64,
            dstMemoryType: CU_MEMORYTYPE_ARRAY,
            dstArray: made,
            WidthInBytes: 64,
            Height: 32,
            ..CUDA_MEMCPY2D::default()
        };
        t.code("down", cu.cuMemcpy2D_v2(&down));
        let address = cu.alloc(64 * 32);
        let across = CUDA_MEMCPY2D {
            srcMemoryType: CU_MEMORYTYPE_ARRAY,
            srcArray: made,
            dstMemoryType: CU_MEMORYTYPE_DEVICE,
            dstDevice: address,
            dstPitch: 64,
            WidthInBytes: 64,
            Height: 32,
            ..CUDA_MEMCPY2D::default()
        };
        t.code("across", cu.cuMemcpy2D_v2(&across));
        t.see("bytes", compare(&cu.read(address, 64 * 32), &sent));
        let mut row = [0_u8; 16];
        t.code("row", cu.cuMemcpyAtoH_v2(row.as_mut_ptr().cast(), made, 64, 16));
        t.see("row", compare(&row, &sent[64..80]));
    }),
    Behaviour::new("array.misuse", "No width, no format, no place", |t, cu| {
        let _there = array(t, cu, 16, 0);
        let mut made = CUarray::NULL;
        t.code("no width", cu.cuArrayCreate_v2(&mut made, &flat(0, 4)));
        let bad = CUDA_ARRAY_DESCRIPTOR {
            NumChannels: 3,
            ..flat(16, 16)
        };
        t.code("3 channels", cu.cuArrayCreate_v2(&mut made, &bad));
        t.code(
            "no place",
            cu.cuArrayCreate_v2(std::ptr::null_mut(), &flat(16, 16)),
        );
        t.code("destroy none", cu.cuArrayDestroy(CUarray::NULL));
    }),
    Behaviour::new(
        "array.one_row",
        "A height of zero is a one-dimensional array",
        |t, cu| {
            let made = array(t, cu, 256, 0);
            t.see("create", either(made.map(|_| "an array")));
            let Ok(made) = made else { return };
            let sent = pattern(256, 2);
            let mut seen = [0_u8; 256];
            t.code("down", cu.cuMemcpyHtoA_v2(made, 0, sent.as_ptr().cast(), 256));
            t.code("up", cu.cuMemcpyAtoH_v2(seen.as_mut_ptr().cast(), made, 0, 256));
            t.see("bytes", compare(&seen, &sent));
        },
    ),
    Behaviour::new(
        "array.three_dimensions",
        "A three-dimensional array is described and filled",
        |t, cu| {
            let mut made = CUarray::NULL;
            let wanted = CUDA_ARRAY3D_DESCRIPTOR {
                Width: 16,
                Height: 8,
                Depth: 4,
                Format: CU_AD_FORMAT_UNSIGNED_INT8,
                NumChannels: 1,
                Flags: 0,
            };
            let code = cu.cuArray3DCreate_v2(&mut made, &wanted);
            let code = t.exists("cuArray3DCreate", code);
            t.code("create", code);
            let mut told = CUDA_ARRAY3D_DESCRIPTOR::default();
            t.code("describe", cu.cuArray3DGetDescriptor_v2(&mut told, made));
            t.see("size", format!("{} {} {}", told.Width, told.Height, told.Depth));
            t.code("destroy", cu.cuArrayDestroy(made));
        },
    )
    .fact(&[
        "create: SUCCESS",
        "describe: SUCCESS",
        "size: 16 8 4",
        "destroy: SUCCESS",
    ]),
    Behaviour::new(
        "array.counts_as_memory",
        "An array of 64 MiB takes about that from what is free",
        |t, cu| {
            let info = || {
                let (mut free, mut total) = (0, 0);
                must("cuMemGetInfo", cu.cuMemGetInfo_v2(&mut free, &mut total));
                free
            };
            let before = info();
            let Ok(made) = array(t, cu, 8192, 8192) else {
                return;
            };
            let taken = before.saturating_sub(info()) / MIB;
            t.see("taken", (64..80).contains(&taken));
            t.code("destroy", cu.cuArrayDestroy(made));
            t.see("missing MiB", before.saturating_sub(info()) / MIB);
        },
    )
    .alone()
    .fact(&["taken: true", "destroy: SUCCESS", "missing MiB: 0"]),
    Behaviour::new("array.mipmapped", "A mipmapped array has levels", |t, cu| {
        let wanted = CUDA_ARRAY3D_DESCRIPTOR {
            Width: 64,
            Height: 64,
            Depth: 0,
            Format: CU_AD_FORMAT_UNSIGNED_INT8,
            NumChannels: 1,
            Flags: 0,
        };
        let (mut made, mut level) = (CUmipmappedArray::NULL, CUarray::NULL);
        let code = cu.cuMipmappedArrayCreate(&mut made, &wanted, 3);
        let code = t.exists("cuMipmappedArrayCreate", code);
        t.code("create", code);
        t.code("level 1", cu.cuMipmappedArrayGetLevel(&mut level, made, 1));
        let mut told = CUDA_ARRAY_DESCRIPTOR::default();
        must("describe", cu.cuArrayGetDescriptor_v2(&mut told, level));
        t.see("its width", told.Width);
        t.code("destroy", cu.cuMipmappedArrayDestroy(made));
    })
    .fact(&[
        "create: SUCCESS",
        "level 1: SUCCESS",
        "its width: 32",
        "destroy: SUCCESS",
    ]),
];
