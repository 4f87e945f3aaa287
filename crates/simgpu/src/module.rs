//! Modules, libraries and kernels: PTX text, of which only the names matter.

use std::sync::{Arc, Mutex};

use ebb_abi::*;

use crate::R;
use crate::caller::Caller;
use crate::context::{self, Context};
use crate::handles::fresh;
use crate::kernels::{Builtin, offsets};
use crate::memory::{Kind, alloc};
use crate::process::{lock, process};

/// What a PTX text defines.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Image {
    pub(crate) entries: Vec<String>,
    /// Local memory of each entry, in bytes for a thread.
    pub(crate) local: Vec<u64>,
    /// Variables in global and constant memory: name and bytes.
    pub(crate) globals: Vec<(String, u64)>,
}

impl Image {
    /// Reads what `.entry` and `.global` lines of a PTX text define. Comments are not read.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = without_comments(text);
        if !text.contains(".version") || !text.contains(".target") {
            return None;
        }
        let mut image = Self::default();
        for (at, _) in text.match_indices(".entry") {
            let rest = text[at + ".entry".len()..].trim_start();
            let name: String = rest
                .chars()
                .take_while(|c| c.is_alphanumeric() || matches!(c, '_' | '$'))
                .collect();
            if !name.is_empty() {
                let body = rest.split(".entry").next().unwrap_or("");
                let local = body
                    .split([';', '{', '}'])
                    .filter_map(|statement| parse_variable(statement, ".local"));
                image.local.push(local.map(|(_, bytes)| bytes).sum());
                image.entries.push(name);
            }
        }
        for statement in text.split([';', '{', '}']) {
            for space in [".global", ".const"] {
                image.globals.extend(parse_variable(statement, space));
            }
        }
        Some(image)
    }
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("/*") {
        out.push_str(&rest[..at]);
        rest = rest[at..].find("*/").map_or("", |end| &rest[at + end + 2..]);
    }
    out.push_str(rest);
    out.lines()
        .map(|line| line.split("//").next().unwrap_or(""))
        .collect::<Vec<_>>()
        .join("\n")
}

/// `.visible .global .align 4 .u32 name[3]` and shorter forms.
fn parse_variable(statement: &str, space: &str) -> Option<(String, u64)> {
    let statement = statement.trim();
    let at = statement.find(space)?;
    // Directives of the file (`.version` and so on) end with their line, not with a semicolon.
    let before = statement[..at].rsplit('\n').next().unwrap_or("");
    let directives_only = before
        .split_whitespace()
        .all(|word| word.starts_with('.') && word.len() > 1);
    if !directives_only {
        return None;
    }
    let mut unit = 0;
    let mut words = statement[at + space.len()..].split_whitespace();
    while let Some(word) = words.next() {
        match word {
            ".align" => {
                words.next();
            }
            ".b8" | ".u8" | ".s8" => unit = 1,
            ".b16" | ".u16" | ".s16" | ".f16" => unit = 2,
            ".b32" | ".u32" | ".s32" | ".f32" => unit = 4,
            ".b64" | ".u64" | ".s64" | ".f64" => unit = 8,
            name if !name.starts_with('.') => {
                let name = name.split('=').next().unwrap_or(name);
                let (name, count) = match name.split_once('[') {
                    Some((name, count)) => (name, count.trim_end_matches(']').parse().ok()?),
                    None => (name, 1),
                };
                return (unit > 0 && !name.is_empty()).then(|| (name.to_owned(), unit * count));
            }
            _ => {}
        }
    }
    None
}

/// Code in a context.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) handle: usize,
    pub(crate) context: usize,
    image: Image,
    /// The functions that were asked for: a name always answers the same handle.
    functions: Mutex<Vec<Arc<Function>>>,
    globals: Vec<(String, u64, u64)>,
    /// What it was charged for besides; zero until it is loaded in earnest.
    charged: Mutex<u64>,
}

/// Whether modules are loaded whole at once: `CUDA_MODULE_LOADING=EAGER`.
fn is_eager() -> bool {
    static EAGER: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *EAGER.get_or_init(|| std::env::var("CUDA_MODULE_LOADING").is_ok_and(|mode| mode == "EAGER"))
}

impl Module {
    /// Loads it in earnest: it takes its memory, once.
    fn load_now(&self) -> R {
        let bytes = process().machine.config().module_bytes;
        let mut charged = lock(&self.charged);
        if *charged == 0
            && let Some(context) = process().contexts.get(self.context)
        {
            context.charge_module(bytes)?;
            *charged = bytes;
        }
        Ok(())
    }
}

/// A kernel. The simulation runs the built-in ones; launching another is NOT_SUPPORTED.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) handle: usize,
    /// The context's handle; zero for a kernel of a library, which works in every context.
    pub(crate) context: usize,
    module: usize,
    /// The name with a zero at its end, for those who ask.
    name: String,
    pub(crate) builtin: Option<Builtin>,
    /// Bytes of local memory for a thread.
    pub(crate) local: u64,
}

/// Code for all contexts.
#[derive(Debug)]
pub(crate) struct Library {
    image: Image,
    kernels: Mutex<Vec<Arc<Function>>>,
    /// The module it is in each context, by the context's handle.
    modules: Mutex<Vec<(usize, usize)>>,
}

fn image_of(c: &Caller, image: *const c_void) -> Result<Image, CUresult> {
    if image.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let head = c.array(image.cast::<u8>(), 4)?;
    match head.as_slice() {
        [0x7f, b'E', b'L', b'F'] | [0x50, 0xed, 0x55, 0xba] => return Err(CUresult::ERROR_NO_BINARY_FOR_GPU),
        _ => {}
    }
    Image::parse(c.text(image.cast())?).ok_or(CUresult::ERROR_INVALID_PTX)
}

fn load(context: &Context, image: Image) -> Result<Arc<Module>, CUresult> {
    context.shared.check()?;
    let mut globals = Vec::new();
    for (name, bytes) in &image.globals {
        match alloc::allocate(context, (*bytes).max(1), Kind::Global) {
            Ok(address) => globals.push((name.clone(), address, *bytes)),
            Err(code) => {
                globals
                    .iter()
                    .for_each(|(_, address, _)| alloc::free_global(context, *address));
                return Err(code);
            }
        }
    }
    let handle = fresh();
    let module = Arc::new(Module {
        handle,
        context: context.shared.handle,
        image,
        functions: Mutex::default(),
        globals,
        charged: Mutex::default(),
    });
    if is_eager()
        && let Err(code) = module.load_now()
    {
        module
            .globals
            .iter()
            .for_each(|(_, address, _)| alloc::free_global(context, *address));
        return Err(code);
    }
    process().modules.insert(handle, Arc::clone(&module));
    Ok(module)
}

pub(crate) fn cuModuleLoadData(c: &Caller, module: *mut CUmodule, image: *const c_void) -> R {
    let context = context::current()?;
    if module.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let loaded = load(&context, image_of(c, image)?)?;
    c.put(module, CUmodule(loaded.handle))
}

pub(crate) fn cuModuleLoadDataEx(
    c: &Caller,
    module: *mut CUmodule,
    image: *const c_void,
    _numOptions: u32,
    _options: *mut CUjit_option,
    _optionValues: *mut *mut c_void,
) -> R {
    cuModuleLoadData(c, module, image)
}

pub(crate) fn cuModuleLoadFatBinary(c: &Caller, module: *mut CUmodule, fatCubin: *const c_void) -> R {
    cuModuleLoadData(c, module, fatCubin)
}

fn image_of_file(c: &Caller, path: *const c_char) -> Result<Image, CUresult> {
    let bytes = std::fs::read(c.text(path)?).map_err(|_| CUresult::ERROR_FILE_NOT_FOUND)?;
    let text = String::from_utf8(bytes).map_err(|_| CUresult::ERROR_NO_BINARY_FOR_GPU)?;
    Image::parse(&text).ok_or(CUresult::ERROR_INVALID_PTX)
}

pub(crate) fn cuModuleLoad(c: &Caller, module: *mut CUmodule, fname: *const c_char) -> R {
    let context = context::current()?;
    let loaded = load(&context, image_of_file(c, fname)?)?;
    c.put(module, CUmodule(loaded.handle))
}

pub(crate) fn cuModuleUnload(_: &Caller, hmod: CUmodule) -> R {
    let current = context::current()?;
    let module = process()
        .modules
        .remove(hmod.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let context = process().contexts.get(module.context).unwrap_or(current);
    context.shared.drain();
    context.credit_module(std::mem::take(&mut *lock(&module.charged)));
    process()
        .functions
        .remove_where(|function| function.module == module.handle);
    module
        .globals
        .iter()
        .for_each(|(_, address, _)| alloc::free_global(&context, *address));
    Ok(())
}

fn function_of(
    image: &Image,
    known: &Mutex<Vec<Arc<Function>>>,
    name: &str,
    context: usize,
    module: usize,
) -> Result<Arc<Function>, CUresult> {
    let index = image.entries.iter().position(|entry| entry == name);
    let index = index.ok_or(CUresult::ERROR_NOT_FOUND)?;
    let mut known = lock(known);
    let terminated = format!("{name}\0");
    if let Some(function) = known.iter().find(|function| function.name == terminated) {
        return Ok(Arc::clone(function));
    }
    let handle = fresh();
    let builtin = Builtin::by_name(name);
    let function = Arc::new(Function {
        handle,
        context,
        module,
        name: terminated,
        builtin,
        local: image.local[index],
    });
    process().functions.insert(handle, Arc::clone(&function));
    known.push(Arc::clone(&function));
    Ok(function)
}

pub(crate) fn cuModuleGetFunction(
    c: &Caller,
    hfunc: *mut CUfunction,
    hmod: CUmodule,
    name: *const c_char,
) -> R {
    context::current()?;
    let module = process()
        .modules
        .get(hmod.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    module.load_now()?;
    let function = function_of(
        &module.image,
        &module.functions,
        c.text(name)?,
        module.context,
        module.handle,
    )?;
    c.put(hfunc, CUfunction(function.handle))
}

pub(crate) fn cuModuleGetFunctionCount(c: &Caller, count: *mut u32, mod_: CUmodule) -> R {
    let module = process()
        .modules
        .get(mod_.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    c.put(count, module.image.entries.len() as u32)
}

pub(crate) fn cuModuleEnumerateFunctions(
    c: &Caller,
    functions: *mut CUfunction,
    numFunctions: u32,
    mod_: CUmodule,
) -> R {
    let module = process()
        .modules
        .get(mod_.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let mut found = Vec::new();
    for name in &module.image.entries {
        let function = function_of(
            &module.image,
            &module.functions,
            name,
            module.context,
            module.handle,
        )?;
        found.push(CUfunction(function.handle));
    }
    c.put_array(functions, numFunctions as usize, &found)
}

pub(crate) fn cuModuleGetGlobal_v2(
    c: &Caller,
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
    hmod: CUmodule,
    name: *const c_char,
) -> R {
    let module = process()
        .modules
        .get(hmod.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    let name = c.text(name)?;
    let (_, address, size) = module
        .globals
        .iter()
        .find(|(known, ..)| known == name)
        .ok_or(CUresult::ERROR_NOT_FOUND)?;
    c.put_optional(dptr, CUdeviceptr(*address));
    c.put_optional(bytes, *size as usize);
    Ok(())
}

pub(crate) fn cuModuleGetLoadingMode(c: &Caller, mode: *mut CUmoduleLoadingMode) -> R {
    c.put(
        mode,
        if is_eager() {
            CU_MODULE_EAGER_LOADING
        } else {
            CU_MODULE_LAZY_LOADING
        },
    )
}

fn add_library(c: &Caller, library: *mut CUlibrary, image: Image) -> R {
    let handle = fresh();
    process().libraries.insert(
        handle,
        Arc::new(Library {
            image,
            kernels: Mutex::default(),
            modules: Mutex::default(),
        }),
    );
    c.put(library, CUlibrary(handle))
}

pub(crate) fn cuLibraryLoadData(
    c: &Caller,
    library: *mut CUlibrary,
    code: *const c_void,
    _jitOptions: *mut CUjit_option,
    _jitOptionsValues: *mut *mut c_void,
    _numJitOptions: u32,
    _libraryOptions: *mut CUlibraryOption,
    _libraryOptionValues: *mut *mut c_void,
    _numLibraryOptions: u32,
) -> R {
    if library.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let image = image_of(c, code)?;
    add_library(c, library, image)
}

pub(crate) fn cuLibraryLoadFromFile(
    c: &Caller,
    library: *mut CUlibrary,
    fileName: *const c_char,
    _jitOptions: *mut CUjit_option,
    _jitOptionsValues: *mut *mut c_void,
    _numJitOptions: u32,
    _libraryOptions: *mut CUlibraryOption,
    _libraryOptionValues: *mut *mut c_void,
    _numLibraryOptions: u32,
) -> R {
    if library.is_null() {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    let image = image_of_file(c, fileName)?;
    add_library(c, library, image)
}

fn library(handle: CUlibrary) -> Result<Arc<Library>, CUresult> {
    process()
        .libraries
        .get(handle.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)
}

pub(crate) fn cuLibraryUnload(c: &Caller, library: CUlibrary) -> R {
    let found = process()
        .libraries
        .remove(library.0)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)?;
    for kernel in lock(&found.kernels).iter() {
        process().functions.remove(kernel.handle);
    }
    let modules = std::mem::take(&mut *lock(&found.modules));
    for (context, module) in modules {
        if process().contexts.get(context).is_some() {
            let _ = cuModuleUnload(c, CUmodule(module));
        }
    }
    Ok(())
}

pub(crate) fn cuLibraryGetKernel(
    c: &Caller,
    pKernel: *mut CUkernel,
    library_: CUlibrary,
    name: *const c_char,
) -> R {
    let found = library(library_)?;
    let function = function_of(&found.image, &found.kernels, c.text(name)?, 0, library_.0)?;
    c.put(pKernel, CUkernel(function.handle))
}

pub(crate) fn cuLibraryGetKernelCount(c: &Caller, count: *mut u32, lib: CUlibrary) -> R {
    c.put(count, library(lib)?.image.entries.len() as u32)
}

/// The module that a library is in the current context.
fn module_of(library: &Library) -> Result<Arc<Module>, CUresult> {
    let context = context::current()?;
    let mut modules = lock(&library.modules);
    let known = modules
        .iter()
        .find(|(handle, _)| *handle == context.shared.handle)
        .map(|(_, module)| *module);
    if let Some(module) = known.and_then(|handle| process().modules.get(handle)) {
        return Ok(module);
    }
    let module = load(&context, library.image.clone())?;
    modules.retain(|(handle, _)| *handle != context.shared.handle);
    modules.push((context.shared.handle, module.handle));
    Ok(module)
}

pub(crate) fn cuLibraryGetModule(c: &Caller, pMod: *mut CUmodule, library_: CUlibrary) -> R {
    c.put(pMod, CUmodule(module_of(&*library(library_)?)?.handle))
}

pub(crate) fn cuLibraryGetGlobal(
    c: &Caller,
    dptr: *mut CUdeviceptr,
    bytes: *mut usize,
    library_: CUlibrary,
    name: *const c_char,
) -> R {
    let module = module_of(&*library(library_)?)?;
    cuModuleGetGlobal_v2(c, dptr, bytes, CUmodule(module.handle), name)
}

fn function(handle: usize) -> Result<Arc<Function>, CUresult> {
    process()
        .functions
        .get(handle)
        .ok_or(CUresult::ERROR_INVALID_HANDLE)
}

pub(crate) fn cuKernelGetFunction(c: &Caller, pFunc: *mut CUfunction, kernel: CUkernel) -> R {
    context::current()?;
    function(kernel.0)?;
    // A kernel's handle launches as a function in whatever context is current.
    c.put(pFunc, CUfunction(kernel.0))
}

pub(crate) fn cuKernelGetLibrary(c: &Caller, pLib: *mut CUlibrary, kernel: CUkernel) -> R {
    c.put(pLib, CUlibrary(function(kernel.0)?.module))
}

pub(crate) fn cuFuncGetModule(c: &Caller, hmod: *mut CUmodule, hfunc: CUfunction) -> R {
    c.put(hmod, CUmodule(function(hfunc.0)?.module))
}

pub(crate) fn cuFuncGetName(c: &Caller, name: *mut *const c_char, hfunc: CUfunction) -> R {
    // Lives as long as the function's handle.
    c.put(name, function(hfunc.0)?.name.as_ptr().cast())
}

pub(crate) fn cuKernelGetName(c: &Caller, name: *mut *const c_char, hfunc: CUkernel) -> R {
    cuFuncGetName(c, name, CUfunction(hfunc.0))
}

pub(crate) fn cuFuncGetParamInfo(
    c: &Caller,
    func: CUfunction,
    paramIndex: usize,
    paramOffset: *mut usize,
    paramSize: *mut usize,
) -> R {
    let sizes = function(func.0)?
        .builtin
        .ok_or(CUresult::ERROR_NOT_SUPPORTED)?
        .parameters();
    let size = sizes.get(paramIndex).ok_or(CUresult::ERROR_INVALID_VALUE)?;
    c.put(paramOffset, offsets(sizes)[paramIndex])?;
    c.put_optional(paramSize, *size);
    Ok(())
}

pub(crate) fn cuKernelGetParamInfo(
    c: &Caller,
    kernel: CUkernel,
    paramIndex: usize,
    paramOffset: *mut usize,
    paramSize: *mut usize,
) -> R {
    cuFuncGetParamInfo(c, CUfunction(kernel.0), paramIndex, paramOffset, paramSize)
}

fn attribute(attrib: CUfunction_attribute) -> i32 {
    match attrib {
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
        CU_FUNC_ATTRIBUTE_NUM_REGS => 16,
        CU_FUNC_ATTRIBUTE_PTX_VERSION => 70,
        CU_FUNC_ATTRIBUTE_BINARY_VERSION => 90,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => 48 << 10,
        _ => 0,
    }
}

pub(crate) fn cuFuncGetAttribute(
    c: &Caller,
    pi: *mut i32,
    attrib: CUfunction_attribute,
    hfunc: CUfunction,
) -> R {
    let function = function(hfunc.0)?;
    if attrib == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES {
        return c.put(pi, function.local as i32);
    }
    c.put(pi, attribute(attrib))
}

pub(crate) fn cuFuncSetAttribute(
    _: &Caller,
    hfunc: CUfunction,
    _attrib: CUfunction_attribute,
    _value: i32,
) -> R {
    function(hfunc.0).map(drop)
}

pub(crate) fn cuKernelGetAttribute(
    c: &Caller,
    pi: *mut i32,
    attrib: CUfunction_attribute,
    kernel: CUkernel,
    _dev: CUdevice,
) -> R {
    cuFuncGetAttribute(c, pi, attrib, CUfunction(kernel.0))
}

pub(crate) fn cuKernelSetAttribute(
    c: &Caller,
    attrib: CUfunction_attribute,
    val: i32,
    kernel: CUkernel,
    _dev: CUdevice,
) -> R {
    cuFuncSetAttribute(c, CUfunction(kernel.0), attrib, val)
}

pub(crate) fn cuFuncSetCacheConfig(_: &Caller, hfunc: CUfunction, _config: CUfunc_cache) -> R {
    function(hfunc.0).map(drop)
}

pub(crate) fn cuFuncLoad(_: &Caller, function_: CUfunction) -> R {
    function(function_.0).map(drop)
}

pub(crate) fn cuFuncIsLoaded(c: &Caller, state: *mut CUfunctionLoadingState, function_: CUfunction) -> R {
    function(function_.0)?;
    c.put(state, CU_FUNCTION_LOADING_STATE_LOADED)
}

pub(crate) fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    c: &Caller,
    numBlocks: *mut i32,
    func: CUfunction,
    blockSize: i32,
    _dynamicSMemSize: usize,
) -> R {
    function(func.0)?;
    if !(1..=1024).contains(&blockSize) {
        return Err(CUresult::ERROR_INVALID_VALUE);
    }
    c.put(numBlocks, (2048 / blockSize).min(32))
}

pub(crate) fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    c: &Caller,
    numBlocks: *mut i32,
    func: CUfunction,
    blockSize: i32,
    dynamicSMemSize: usize,
    _flags: u32,
) -> R {
    cuOccupancyMaxActiveBlocksPerMultiprocessor(c, numBlocks, func, blockSize, dynamicSMemSize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_in_ptx() {
        let image = Image::parse(
            ".version 7.0\n.target sm_70\n.address_size 64\n// .entry not_this\n/* .entry nor_this */\n\
             .visible .global .align 8 .u64 counter;\n.global .align 4 .b8 table[12] = {1};\n\
             .visible .entry ebb_fill(.param .u64 p) { ld.global.u32 %r1, [%rd1]; ret; }\n.entry other() { ret; }",
        )
        .unwrap();
        assert_eq!(image.entries, ["ebb_fill", "other"]);
        assert_eq!(
            image.globals,
            [("counter".to_owned(), 8), ("table".to_owned(), 12)]
        );
        assert_eq!(Image::parse("hello"), None);
    }

    #[test]
    fn the_shipped_text_defines_all_kernels() {
        let image = Image::parse(include_str!("../ptx/kernels.ptx")).unwrap();
        for name in [
            "ebb_fill",
            "ebb_check",
            "ebb_saxpy",
            "ebb_sum",
            "ebb_touch",
            "ebb_spin",
            "ebb_spin_until",
            "ebb_empty",
        ] {
            assert!(image.entries.iter().any(|entry| entry == name), "{name}");
            assert!(Builtin::by_name(name).is_some(), "{name}");
        }
        assert_eq!(image.entries.len(), 8);
    }
}
