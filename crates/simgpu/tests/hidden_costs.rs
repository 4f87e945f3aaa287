//! What the driver takes on its own: local memory at launches, modules, the shares of MPS.

#![allow(
    non_snake_case,
    clippy::undocumented_unsafe_blocks,
    reason = "test code, calls through the C interface"
)]

mod common;

use common::*;
use ebb_abi::*;

const SMALL: &[(&str, &str)] = &[("EBB_SIM_MEMORY", "128Mi"), ("EBB_SIM_CONTEXT_BYTES", "0")];
const LOCAL: &str = include_str!("../ptx/local.ptx");
/// 4096 bytes for each of 8 times 2048 threads, of which the context has 1024 from the start.
const NEEDED: usize = 48 * MIB;

fn local(cuda: &Cuda) -> (CUmodule, CUfunction) {
    let (mut module, mut function) = (CUmodule::NULL, CUfunction::NULL);
    ok(cuda.cuModuleLoadData(&mut module, c(LOCAL).as_ptr().cast()));
    ok(cuda.cuModuleGetFunction(&mut function, module, c("ebb_local").as_ptr()));
    (module, function)
}

#[test]
fn bug_116_a_launch_takes_local_memory() {
    alone("bug_116_a_launch_takes_local_memory", SMALL, |cuda| {
        let out = cuda.alloc(4);
        let before = cuda.free_bytes();
        let (_, function) = local(cuda);
        let mut bytes = 0;
        ok(cuda.cuFuncGetAttribute(&mut bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function));
        assert_eq!(bytes, 4096);
        assert_eq!(cuda.free_bytes(), before, "nothing before the launch");
        ok(cuda.launch(function, NO_STREAM, &[out.0, 300]));
        ok(cuda.cuCtxSynchronize());
        assert_eq!(cuda.read(out, 4), 300_u32.to_le_bytes());
        assert_eq!(cuda.free_bytes(), before - NEEDED);
        ok(cuda.launch(function, NO_STREAM, &[out.0, 5]));
        assert_eq!(cuda.free_bytes(), before - NEEDED, "once");
        let machine = ebb_simdev::Machine::open_from_env().unwrap();
        let mine = machine.processes(0)[0].bytes as usize;
        assert_eq!(mine, 128 * MIB - before + NEEDED, "and NVML sees it");
        // A stack that the program wants larger is the same thing.
        ok(cuda.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 6144));
        ok(cuda.launch(function, NO_STREAM, &[out.0, 5]));
        assert_eq!(cuda.free_bytes(), before - 80 * MIB);
        // So are larger buffers, at once, and smaller ones give it back.
        ok(cuda.cuCtxSetLimit(CU_LIMIT_PRINTF_FIFO_SIZE, 5 * MIB));
        ok(cuda.cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 12 * MIB));
        assert_eq!(cuda.free_bytes(), before - 88 * MIB);
        assert_eq!(
            cuda.cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 200 * MIB),
            CUresult::ERROR_OUT_OF_MEMORY
        );
        ok(cuda.cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MIB));
        assert_eq!(cuda.free_bytes(), before - 84 * MIB);
        // It goes with the context.
        ok(cuda.cuDevicePrimaryCtxReset_v2(CUdevice(0)));
        assert_eq!(machine.usage(0).used, 0);
    });
}

#[test]
fn a_launch_without_room_for_local_memory() {
    alone("a_launch_without_room_for_local_memory", SMALL, |cuda| {
        let out = cuda.alloc(4);
        let (_, function) = local(cuda);
        let rest = cuda.alloc(90 * MIB);
        assert_eq!(
            cuda.launch(function, NO_STREAM, &[out.0, 1]),
            CUresult::ERROR_OUT_OF_MEMORY
        );
        // A graph's launch is no different, and the context is well afterwards.
        let s = cuda.stream(CU_STREAM_NON_BLOCKING.0);
        ok(cuda.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
        ok(cuda.launch(function, s, &[out.0, 1]));
        let (mut graph, mut exec) = (CUgraph::NULL, CUgraphExec::NULL);
        ok(cuda.cuStreamEndCapture(s, &mut graph));
        ok(cuda.cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        assert_eq!(cuda.cuGraphLaunch(exec, s), CUresult::ERROR_OUT_OF_MEMORY);
        ok(cuda.cuMemFree_v2(rest));
        ok(cuda.cuGraphLaunch(exec, s));
        ok(cuda.cuStreamSynchronize(s));
        assert_eq!(cuda.read(out, 4), 1_u32.to_le_bytes());
    });
}

#[test]
fn modules_cost_from_their_first_function_on() {
    let mut variables = SMALL.to_vec();
    variables.push(("EBB_SIM_MODULE_BYTES", "8Mi"));
    alone("modules_cost_from_their_first_function_on", &variables, |cuda| {
        let mut module = CUmodule::NULL;
        ok(cuda.cuModuleLoadData(&mut module, c(LOCAL).as_ptr().cast()));
        assert_eq!(cuda.free_bytes(), 128 * MIB);
        let mut function = CUfunction::NULL;
        for _ in 0..2 {
            ok(cuda.cuModuleGetFunction(&mut function, module, c("ebb_local").as_ptr()));
            assert_eq!(cuda.free_bytes(), 120 * MIB);
        }
        ok(cuda.cuModuleUnload(module));
        assert_eq!(cuda.free_bytes(), 128 * MIB);
    });
}

#[test]
fn modules_cost_at_once_when_told() {
    let mut variables = SMALL.to_vec();
    variables.extend([("EBB_SIM_MODULE_BYTES", "8Mi"), ("CUDA_MODULE_LOADING", "EAGER")]);
    alone("modules_cost_at_once_when_told", &variables, |cuda| {
        let (module, _) = local(cuda);
        assert_eq!(cuda.free_bytes(), 120 * MIB);
        let rest = cuda.alloc(118 * MIB);
        let mut other = CUmodule::NULL;
        assert_eq!(
            cuda.cuModuleLoadData(&mut other, c(LOCAL).as_ptr().cast()),
            CUresult::ERROR_OUT_OF_MEMORY
        );
        ok(cuda.cuMemFree_v2(rest));
        let mut mode = CUmoduleLoadingMode(0);
        ok(cuda.cuModuleGetLoadingMode(&mut mode));
        assert_eq!(mode, CU_MODULE_EAGER_LOADING);
        ok(cuda.cuModuleUnload(module));
    });
}

#[test]
fn clients_of_mps_share_a_server() {
    if plays("client") {
        let cuda = Cuda::start();
        let mut enabled = 0;
        ok(cuda.cuDeviceGetAttribute(&mut enabled, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, CUdevice(0)));
        say(&enabled.to_string());
        hear();
        return;
    }
    let variables = [
        ("EBB_SIM_MEMORY", "256Mi"),
        ("EBB_SIM_CONTEXT_BYTES", "99Mi"),
        ("EBB_SIM_MPS_CLIENT_BYTES", "10Mi"),
        ("EBB_SIM_MPS_SERVER_BYTES", "60Mi"),
    ];
    if !is_main() {
        return;
    }
    let dir = state_dir();
    let start = || {
        Actor::start(command(
            "clients_of_mps_share_a_server",
            "client",
            dir.path(),
            &variables,
        ))
    };
    let mut first = start();
    assert_eq!(first.hear(), "1");
    let machine = machine(dir.path());
    assert_eq!(machine.usage(0).used as usize, 70 * MIB);
    let mut second = start();
    second.hear();
    assert_eq!(machine.usage(0).used as usize, 80 * MIB);
    assert_eq!(machine.processes(0).len(), 2);
    first.kill();
    assert_eq!(machine.usage(0).used as usize, 70 * MIB);
    second.kill();
    assert_eq!(machine.usage(0).used, 0);
}
