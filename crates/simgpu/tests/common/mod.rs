//! Driving the built library as a program does: `dlopen`, look up, call. Each test runs in a process of its own, because the
//! library reads its environment once.

#![allow(
    non_snake_case,
    dead_code,
    unreachable_pub,
    missing_debug_implementations,
    reason = "test code with the driver's names; each file uses a part"
)]

use std::ffi::{CString, c_char, c_void};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use ebb_abi::*;
use ebb_simdev::Machine;
use libloading::Library;

pub const MIB: usize = 1 << 20;
pub const PTX: &str = include_str!("../../ptx/kernels.ptx");

/// The library that was built together with this test: it lies beside it, or one folder up after a full build.
pub fn library_path() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    let beside = deps.join("libsimcuda.so");
    if beside.exists() {
        beside
    } else {
        deps.parent().unwrap().join("libsimcuda.so")
    }
}

macro_rules! calls {
    ($($name:ident($($parameter:ident: $ty:ty),*);)*) => {
        impl Cuda {$(
            #[allow(clippy::too_many_arguments)]
            pub fn $name(&self, $($parameter: $ty),*) -> CUresult {
                type Call = unsafe extern "C" fn($($ty),*) -> CUresult;
                // SAFETY: the symbol has this type; the tests give arguments as the interface demands.
                unsafe {
                    let call = self.library.get::<Call>(concat!(stringify!($name), "\0").as_bytes()).unwrap();
                    call($($parameter),*)
                }
            }
        )*}

        pub const ALL_NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

/// The driver, loaded.
pub struct Cuda {
    pub library: Library,
}

for_each_driver_function!(calls);

/// Asserts success.
#[track_caller]
pub fn ok(result: CUresult) {
    assert_eq!(result, CUresult::SUCCESS);
}

pub const NO_STREAM: CUstream = CUstream::NULL;

impl Cuda {
    pub fn load() -> Self {
        // SAFETY: the library's constructors do nothing that needs care.
        let library = unsafe { Library::new(library_path()) }.unwrap();
        Self { library }
    }

    /// Loads, initialises, and makes the first device's primary context current.
    pub fn start() -> Self {
        let cuda = Self::load();
        ok(cuda.cuInit(0));
        let mut context = CUcontext::NULL;
        ok(cuda.cuDevicePrimaryCtxRetain(&mut context, CUdevice(0)));
        ok(cuda.cuCtxSetCurrent(context));
        cuda
    }

    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        ok(self.cuMemGetInfo_v2(&mut free, &mut total));
        free
    }

    #[track_caller]
    pub fn alloc(&self, bytes: usize) -> CUdeviceptr {
        let mut address = CUdeviceptr::NULL;
        ok(self.cuMemAlloc_v2(&mut address, bytes));
        address
    }

    pub fn try_alloc(&self, bytes: usize) -> Result<CUdeviceptr, CUresult> {
        let mut address = CUdeviceptr::NULL;
        self.cuMemAlloc_v2(&mut address, bytes).ok().map(|()| address)
    }

    #[track_caller]
    pub fn read(&self, address: CUdeviceptr, bytes: usize) -> Vec<u8> {
        let mut host = vec![0xee_u8; bytes];
        ok(self.cuMemcpyDtoH_v2(host.as_mut_ptr().cast(), address, bytes));
        host
    }

    #[track_caller]
    pub fn write(&self, address: CUdeviceptr, bytes: &[u8]) {
        ok(self.cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()));
    }

    #[track_caller]
    pub fn stream(&self, flags: u32) -> CUstream {
        let mut stream = CUstream::NULL;
        ok(self.cuStreamCreate(&mut stream, flags));
        stream
    }

    #[track_caller]
    pub fn event(&self) -> CUevent {
        let mut event = CUevent::NULL;
        ok(self.cuEventCreate(&mut event, 0));
        event
    }

    #[track_caller]
    pub fn kernel(&self, name: &str) -> CUfunction {
        let text = CString::new(PTX).unwrap();
        let mut module = CUmodule::NULL;
        ok(self.cuModuleLoadData(&mut module, text.as_ptr().cast()));
        let name = CString::new(name).unwrap();
        let mut function = CUfunction::NULL;
        ok(self.cuModuleGetFunction(&mut function, module, name.as_ptr()));
        function
    }

    /// Launches with parameters that are given as words; 32-bit ones are read from the low half.
    pub fn launch(&self, function: CUfunction, stream: CUstream, parameters: &[u64]) -> CUresult {
        let mut pointers: Vec<*mut c_void> = parameters
            .iter()
            .map(|word| std::ptr::from_ref(word).cast_mut().cast())
            .collect();
        self.cuLaunchKernel(
            function,
            1,
            1,
            1,
            32,
            1,
            1,
            0,
            stream,
            pointers.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    }

    pub fn device_properties(&self) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: CU_MEM_ALLOCATION_TYPE_PINNED,
            location: CUmemLocation::device(0),
            ..CUmemAllocationProp::default()
        }
    }

    #[track_caller]
    pub fn create(&self, bytes: usize) -> CUmemGenericAllocationHandle {
        self.try_create(bytes, &self.device_properties()).unwrap()
    }

    pub fn try_create(
        &self,
        bytes: usize,
        properties: &CUmemAllocationProp,
    ) -> Result<CUmemGenericAllocationHandle, CUresult> {
        let mut handle = CUmemGenericAllocationHandle::NULL;
        self.cuMemCreate(&mut handle, bytes, properties, 0)
            .ok()
            .map(|()| handle)
    }

    #[track_caller]
    pub fn reserve(&self, bytes: usize) -> CUdeviceptr {
        let mut address = CUdeviceptr::NULL;
        ok(self.cuMemAddressReserve(&mut address, bytes, 0, CUdeviceptr::NULL, 0));
        address
    }

    pub fn set_access(&self, address: CUdeviceptr, bytes: usize, flags: CUmemAccess_flags) -> CUresult {
        let access = CUmemAccessDesc {
            location: CUmemLocation::device(0),
            flags,
        };
        self.cuMemSetAccess(address, bytes, &access, 1)
    }

    #[track_caller]
    pub fn map(&self, address: CUdeviceptr, bytes: usize, handle: CUmemGenericAllocationHandle) {
        ok(self.cuMemMap(address, bytes, 0, handle, 0));
        ok(self.set_access(address, bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    }

    pub fn attribute<T: Default>(
        &self,
        attribute: CUpointer_attribute,
        address: CUdeviceptr,
    ) -> Result<T, CUresult> {
        let mut value = T::default();
        let place = std::ptr::from_mut(&mut value).cast();
        self.cuPointerGetAttribute(place, attribute, address)
            .ok()
            .map(|()| value)
    }
}

/// An address some bytes further on.
pub fn plus(address: CUdeviceptr, bytes: usize) -> CUdeviceptr {
    CUdeviceptr(address.0 + bytes as u64)
}

/// Which part of a test this process plays, if it was started to play one.
fn role() -> Option<String> {
    std::env::var("EBB_SIM_TEST_ROLE").ok()
}

/// A command that runs one test of this file as a process of the simulated machine in `dir`.
pub fn command(test: &str, role: &str, dir: &std::path::Path, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env("EBB_SIM_TEST_ROLE", role);
    for (name, _) in
        std::env::vars().filter(|(name, _)| name.starts_with("EBB_SIM_") && name != "EBB_SIM_TEST_ROLE")
    {
        command.env_remove(name);
    }
    command.env("EBB_SIM_DIR", dir).env_remove("CUDA_VISIBLE_DEVICES");
    command.envs(variables.iter().copied());
    command
}

/// A state folder that goes away with the test.
pub fn state_dir() -> tempfile::TempDir {
    tempfile::Builder::new()
        .prefix("ebb-sim-test-")
        .tempdir_in("/dev/shm")
        .unwrap()
}

/// Runs the body of a test in a process of its own, on a fresh machine with these variables.
pub fn alone(test: &str, variables: &[(&str, &str)], body: impl FnOnce(&Cuda)) {
    alone_raw(test, variables, || body(&Cuda::start()));
}

/// The same without starting the driver.
pub fn alone_raw(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if role().as_deref() == Some("alone") {
        body();
        return;
    }
    let dir = state_dir();
    let output = command(test, "alone", dir.path(), variables).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{test}: {}\n{}\n{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    assert!(
        text(&output.stdout).contains("1 passed"),
        "{test} is not the name of the test"
    );
}

/// Whether this process plays `name`; `None` role means it is the test itself.
pub fn plays(name: &str) -> bool {
    role().as_deref() == Some(name)
}

/// Whether this process is the test itself and not one that it started.
pub fn is_main() -> bool {
    role().is_none()
}

/// A process with pipes to talk to, killed when dropped.
pub struct Actor {
    pub child: Child,
    lines: std::io::BufReader<std::process::ChildStdout>,
}

impl Actor {
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = std::io::BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// The next line that the process says (lines of the test harness are skipped).
    pub fn hear(&mut self) -> String {
        use std::io::BufRead;
        loop {
            let mut line = String::new();
            let count = self.lines.read_line(&mut line).unwrap();
            assert!(count > 0, "the process ended without a word");
            if let Some(at) = line.find("say:") {
                return line[at + 4..].trim_end().to_owned();
            }
        }
    }

    pub fn tell(&mut self, line: &str) {
        use std::io::Write;
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a condition. The limit only keeps a broken test from hanging for ever.
pub fn eventually(what: &str, condition: impl Fn() -> bool) {
    let limit = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !condition() {
        assert!(std::time::Instant::now() < limit, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// What an actor says to the test.
pub fn say(text: &str) {
    println!("say:{text}");
    use std::io::Write;
    std::io::stdout().flush().unwrap();
}

/// What the test tells an actor. Waits for it.
pub fn hear() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// A C string that lives long enough.
pub fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

pub fn c_bytes(bytes: &[c_char]) -> String {
    bytes
        .iter()
        .take_while(|byte| **byte != 0)
        .map(|byte| *byte as u8 as char)
        .collect()
}

/// The machine as a bystander sees it.
pub fn machine(dir: &std::path::Path) -> Machine {
    let dir = dir.to_str().unwrap().to_owned();
    let config =
        ebb_simdev::Config::from_lookup(|name| (name == "EBB_SIM_DIR").then(|| dir.clone())).unwrap();
    Machine::open(config).unwrap()
}

/// The bytes of a handle as text, for a pipe.
pub fn hex(bytes: &[c_char]) -> String {
    bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect()
}

/// The reverse.
pub fn unhex(text: &str) -> [c_char; 64] {
    std::array::from_fn(|index| u8::from_str_radix(&text[index * 2..index * 2 + 2], 16).unwrap() as c_char)
}

/// A descriptor of another process, as a socket would carry it.
pub fn fetch_fd(pid: u32, remote: i32) -> i32 {
    // SAFETY: system calls on plain numbers; their results are checked.
    unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        let fd = libc::syscall(libc::SYS_pidfd_getfd, pidfd, remote, 0);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        libc::close(pidfd as i32);
        fd as i32
    }
}
