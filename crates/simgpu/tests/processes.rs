//! Several processes on one simulated machine: the ledger is exact whoever dies, memory and events are shared as asked.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use std::ffi::c_void;
use std::ptr::null_mut;

use common::*;
use ebb_abi::*;

const SMALL: &[(&str, &str)] = &[("EBB_SIM_MEMORY", "256Mi"), ("EBB_SIM_CONTEXT_BYTES", "16Mi")];

#[test]
fn kill_9_frees_the_bytes() {
    if plays("holder") {
        let cuda = Cuda::start();
        cuda.alloc(64 * MIB);
        let properties = CUmemAllocationProp {
            requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            ..cuda.device_properties()
        };
        cuda.try_create(32 * MIB, &properties).unwrap();
        say("ready");
        hear();
        return;
    }
    let dir = state_dir();
    let mut holder = Actor::start(command("kill_9_frees_the_bytes", "holder", dir.path(), SMALL));
    holder.hear();
    let machine = machine(dir.path());
    assert_eq!(machine.usage(0).used as usize, (64 + 32 + 16) * MIB);
    let list = machine.processes(0);
    assert_eq!(
        (list.len(), list[0].pid, list[0].bytes as usize),
        (1, holder.child.id(), 112 * MIB)
    );
    holder.kill();
    assert_eq!(machine.usage(0).used, 0);
    assert!(machine.processes(0).is_empty());
}

#[test]
fn a_zombie_holds_nothing() {
    if plays("holder") {
        let cuda = Cuda::start();
        cuda.alloc(64 * MIB);
        say("ready");
        hear();
        return;
    }
    let dir = state_dir();
    let mut holder = Actor::start(command("a_zombie_holds_nothing", "holder", dir.path(), SMALL));
    holder.hear();
    let machine = machine(dir.path());
    holder.child.kill().unwrap();
    // Waited for without reaping it: it is a zombie then.
    let mut info = unsafe { std::mem::zeroed::<libc::siginfo_t>() };
    let options = libc::WEXITED | libc::WNOWAIT;
    assert_eq!(
        unsafe { libc::waitid(libc::P_PID, holder.child.id(), &mut info, options) },
        0
    );
    assert_eq!(machine.usage(0).used, 0);
}

#[test]
fn killed_in_the_middle_of_any_call() {
    const CALLS: [&str; 6] = [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemRelease",
        "cuDevicePrimaryCtxRetain",
    ];
    if plays("victim") {
        let cuda = Cuda::start();
        let address = cuda.reserve(2 * MIB);
        let handle = cuda.create(2 * MIB);
        cuda.map(address, 2 * MIB, handle);
        ok(cuda.cuMemUnmap(address, 2 * MIB));
        ok(cuda.cuMemRelease(handle));
        return;
    }
    let dir = state_dir();
    for call in CALLS {
        let fault = format!("{call}:1:kill");
        let mut variables = SMALL.to_vec();
        variables.push(("EBB_SIM_FAULT", &fault));
        let status = command(
            "killed_in_the_middle_of_any_call",
            "victim",
            dir.path(),
            &variables,
        )
        .output()
        .unwrap()
        .status;
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{call}");
        assert_eq!(machine(dir.path()).usage(0).used, 0, "{call}");
    }
}

#[test]
fn the_last_bytes_go_to_exactly_one() {
    if plays("rival") {
        let cuda = Cuda::start();
        say("ready");
        loop {
            match hear().as_str() {
                "go" => match cuda.try_alloc(200 * MIB) {
                    Ok(address) => {
                        say("got");
                        hear();
                        ok(cuda.cuMemFree_v2(address));
                        say("freed");
                    }
                    Err(code) => {
                        assert_eq!(code, CUresult::ERROR_OUT_OF_MEMORY);
                        say("none");
                    }
                },
                _ => return,
            }
        }
    }
    let dir = state_dir();
    let start = || {
        Actor::start(command(
            "the_last_bytes_go_to_exactly_one",
            "rival",
            dir.path(),
            SMALL,
        ))
    };
    let mut rivals = [start(), start()];
    for rival in &mut rivals {
        assert_eq!(rival.hear(), "ready");
    }
    for _ in 0..50 {
        rivals.iter_mut().for_each(|rival| rival.tell("go"));
        let answers: Vec<String> = rivals.iter_mut().map(Actor::hear).collect();
        assert_eq!(
            answers.iter().filter(|answer| *answer == "got").count(),
            1,
            "{answers:?}"
        );
        for (rival, answer) in rivals.iter_mut().zip(&answers) {
            if answer == "got" {
                rival.tell("free");
                assert_eq!(rival.hear(), "freed");
            }
        }
    }
}

#[test]
fn exported_memory_outlives_its_maker() {
    // The descriptor travels as an inherited one, the way a fork-and-exec worker gets it.
    if plays("maker") {
        let cuda = Cuda::start();
        let properties = CUmemAllocationProp {
            requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            ..cuda.device_properties()
        };
        let handle = cuda.try_create(32 * MIB, &properties).unwrap();
        let address = cuda.reserve(32 * MIB);
        cuda.map(address, 32 * MIB, handle);
        cuda.write(address, b"hello from the maker");
        let mut fd = -1;
        let place = std::ptr::from_mut(&mut fd).cast();
        ok(cuda.cuMemExportToShareableHandle(place, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        say(&fd.to_string());
        hear();
        return;
    }
    if plays("taker") {
        let cuda = Cuda::start();
        let fd: usize = std::env::var("EBB_SIM_TEST_FD").unwrap().parse().unwrap();
        let mut handle = CUmemGenericAllocationHandle::NULL;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        ok(cuda.cuMemImportFromShareableHandle(&mut handle, fd as *mut c_void, kind));
        let address = cuda.reserve(32 * MIB);
        cuda.map(address, 32 * MIB, handle);
        ok(cuda.cuMemRelease(handle));
        say("taken");
        hear();
        assert_eq!(cuda.read(address, 20), b"hello from the maker");
        ok(cuda.cuMemUnmap(address, 32 * MIB));
        say("dropped");
        hear();
        return;
    }
    let dir = state_dir();
    let test = "exported_memory_outlives_its_maker";
    let mut maker = Actor::start(command(test, "maker", dir.path(), SMALL));
    let remote: i32 = maker.hear().parse().unwrap();
    let path = format!("/proc/{}/fd/{remote}", maker.child.id());
    // As a socket would carry it: the same open file in another process.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, maker.child.id(), 0) };
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd, remote, 0) };
    assert!(fd >= 0, "{path}: {}", std::io::Error::last_os_error());
    let machine = machine(dir.path());
    maker.kill();
    assert_eq!(
        machine.usage(0).used as usize,
        32 * MIB,
        "a descriptor in flight keeps the memory"
    );
    let fd = fd as i32;
    let mut taker = command(test, "taker", dir.path(), SMALL);
    taker.env("EBB_SIM_TEST_FD", fd.to_string());
    // Only this child gets it, not those of other tests that run at the same time.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut taker, move || {
            libc::fcntl(fd, libc::F_SETFD, 0);
            Ok(())
        });
    }
    let mut taker = Actor::start(taker);
    assert_eq!(taker.hear(), "taken");
    unsafe { libc::close(fd) };
    assert_eq!(
        machine.usage(0).used as usize,
        48 * MIB,
        "charged once, and the context"
    );
    taker.tell("read");
    assert_eq!(taker.hear(), "dropped");
    // The taker inherited the descriptor itself and still has it.
    assert_eq!(machine.usage(0).used as usize, 48 * MIB);
    taker.kill();
    // Children of other tests that were being started meanwhile hold the descriptor until they are what they will be.
    eventually("the last descriptor is closed", || machine.usage(0).used == 0);
}

#[test]
fn legacy_handles_between_processes() {
    if plays("owner") {
        let cuda = Cuda::start();
        cuda.alloc(100);
        let address = cuda.alloc(100);
        cuda.write(address, b"shared bytes");
        let mut memory = CUipcMemHandle { reserved: [0; 64] };
        ok(cuda.cuIpcGetMemHandle(&mut memory, address));
        let mut event = CUevent::NULL;
        ok(cuda.cuEventCreate(&mut event, CU_EVENT_DISABLE_TIMING.0 | CU_EVENT_INTERPROCESS.0));
        let mut name = CUipcEventHandle { reserved: [0; 64] };
        ok(cuda.cuIpcGetEventHandle(&mut name, event));
        let mut own = CUdeviceptr::NULL;
        assert_eq!(
            cuda.cuIpcOpenMemHandle_v2(&mut own, memory, 1),
            CUresult::ERROR_INVALID_CONTEXT
        );
        let flag = cuda.alloc(4);
        ok(cuda.cuMemsetD8_v2(flag, 0, 4));
        ok(cuda.cuCtxSynchronize());
        let s = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        ok(cuda.launch(cuda.kernel("ebb_spin_until"), s, &[flag.0]));
        ok(cuda.cuEventRecord(event, s));
        say(&hex(&memory.reserved));
        say(&hex(&name.reserved));
        assert_eq!(hear(), "go on");
        assert_eq!(cuda.read(address, 12), b"SHARED bytes");
        ok(cuda.cuMemsetD32_v2(flag, 1, 1));
        hear();
        return;
    }
    if plays("guest") {
        let cuda = Cuda::start();
        let memory = CUipcMemHandle {
            reserved: unhex(&hear()),
        };
        let name = CUipcEventHandle {
            reserved: unhex(&hear()),
        };
        let mut address = CUdeviceptr::NULL;
        ok(cuda.cuIpcOpenMemHandle_v2(&mut address, memory, 1));
        assert_eq!(cuda.read(address, 12), b"shared bytes");
        cuda.write(address, b"SHARED");
        assert_eq!(cuda.cuMemFree_v2(address), CUresult::ERROR_INVALID_VALUE);
        let mut event = CUevent::NULL;
        ok(cuda.cuIpcOpenEventHandle(&mut event, name));
        assert_eq!(cuda.cuEventQuery(event), CUresult::ERROR_NOT_READY);
        say("opened");
        hear();
        ok(cuda.cuEventSynchronize(event));
        ok(cuda.cuIpcCloseMemHandle(address));
        say("closed");
        return;
    }
    let dir = state_dir();
    let test = "legacy_handles_between_processes";
    let mut owner = Actor::start(command(test, "owner", dir.path(), SMALL));
    let (memory, event) = (owner.hear(), owner.hear());
    let mut guest = Actor::start(command(test, "guest", dir.path(), SMALL));
    guest.tell(&memory);
    guest.tell(&event);
    assert_eq!(guest.hear(), "opened");
    // What is opened is not charged twice: two contexts and one block.
    assert_eq!(machine(dir.path()).usage(0).used as usize, 34 * MIB);
    owner.tell("go on");
    guest.tell("wait");
    assert_eq!(guest.hear(), "closed");
}

#[test]
fn a_forked_child_does_not_keep_the_parent_alive() {
    if plays("parent") {
        let cuda = Cuda::start();
        cuda.alloc(48 * MIB);
        let properties = CUmemAllocationProp {
            requestedHandleTypes: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            ..cuda.device_properties()
        };
        let handle = cuda.try_create(16 * MIB, &properties).unwrap();
        let address = cuda.reserve(16 * MIB);
        cuda.map(address, 16 * MIB, handle);
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // Says that it runs, and stays until somebody kills it.
            let line = b"say:child\n";
            unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
            unsafe { libc::pause() };
        }
        hear();
        say(&pid.to_string());
        hear();
        return;
    }
    let dir = state_dir();
    let test = "a_forked_child_does_not_keep_the_parent_alive";
    let mut parent = Actor::start(command(test, "parent", dir.path(), SMALL));
    assert_eq!(parent.hear(), "child");
    parent.tell("who?");
    let child: i32 = parent.hear().parse().unwrap();
    let machine = machine(dir.path());
    assert_eq!(machine.usage(0).used as usize, 80 * MIB);
    parent.kill();
    let used = machine.usage(0).used;
    unsafe { libc::kill(child, libc::SIGKILL) };
    assert_eq!(used, 0);
}

#[test]
fn checkpoint_of_another_process() {
    if plays("worker") {
        let cuda = Cuda::start();
        let data = cuda.alloc(32 * MIB);
        cuda.write(data, &[9; 100]);
        say("ready");
        hear();
        say("asked");
        // Waits here while the process is checkpointed.
        assert_eq!(cuda.read(data, 100), [9; 100]);
        say("read");
        hear();
        return;
    }
    if plays("driver") {
        let cuda = Cuda::load();
        ok(cuda.cuInit(0));
        let pid: i32 = hear().parse().unwrap();
        ok(cuda.cuCheckpointProcessLock(pid, null_mut()));
        ok(cuda.cuCheckpointProcessCheckpoint(pid, null_mut()));
        let mut state = CUprocessState(9);
        ok(cuda.cuCheckpointProcessGetState(pid, &mut state));
        assert_eq!(state, CU_PROCESS_STATE_CHECKPOINTED);
        say("out");
        hear();
        ok(cuda.cuCheckpointProcessRestore(pid, null_mut()));
        ok(cuda.cuCheckpointProcessUnlock(pid, null_mut()));
        assert_eq!(
            cuda.cuCheckpointProcessUnlock(pid, null_mut()),
            CUresult::ERROR_ILLEGAL_STATE
        );
        assert_eq!(
            cuda.cuCheckpointProcessLock(1, null_mut()),
            CUresult::ERROR_INVALID_VALUE
        );
        say("in");
        return;
    }
    let dir = state_dir();
    let test = "checkpoint_of_another_process";
    let mut worker = Actor::start(command(test, "worker", dir.path(), SMALL));
    worker.hear();
    let mut driver = Actor::start(command(test, "driver", dir.path(), SMALL));
    driver.tell(&worker.child.id().to_string());
    assert_eq!(driver.hear(), "out");
    let machine = machine(dir.path());
    assert_eq!(machine.usage(0).used, 0);
    worker.tell("read");
    assert_eq!(worker.hear(), "asked");
    driver.tell("restore");
    assert_eq!(driver.hear(), "in");
    assert_eq!(worker.hear(), "read");
    assert_eq!(machine.usage(0).used as usize, 48 * MIB);
}

#[test]
fn the_first_process_fixes_the_machine() {
    if plays("second") {
        let cuda = Cuda::start();
        let mut bytes = 0;
        ok(cuda.cuDeviceTotalMem_v2(&mut bytes, CUdevice(0)));
        assert_eq!(bytes, 256 * MIB);
        return;
    }
    let dir = state_dir();
    let test = "the_first_process_fixes_the_machine";
    for memory in ["256Mi", "8Gi"] {
        let variables = [("EBB_SIM_MEMORY", memory)];
        let output = command(test, "second", dir.path(), &variables).output().unwrap();
        assert!(
            output.status.success(),
            "{memory}: {}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
}
