//! What programs are told: by the driver and by NVML, inside a task, with real processes beside them.

use std::path::{Path, PathBuf};
use std::process::Command;

use ebb_protocol::control::{Answer, Request};
use ebb_tests::{Artefacts, Look, Options, Stage, eventually};
use ebb_units::{Bytes, Priority};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;

fn python() -> PathBuf {
    PathBuf::from("python3")
}

/// A process in an existing task, as a child of its first process would be.
fn member(stage: &Stage, token: &str, env: &[(&str, &str)]) -> Look {
    let mut command = Command::new(python());
    inside(stage, token, &mut command);
    command.envs(env.iter().copied());
    Look::start(command)
}

fn inside(stage: &Stage, token: &str, command: &mut Command) {
    stage.gpu_env(command);
    command
        .env("LD_PRELOAD", &Artefacts::get().layer)
        .env("EBB_SOCKET_DIR", stage.socket_dir())
        .env("EBB_TASK_TOKEN", token);
}

/// A process of a task of its own.
fn job(stage: &Stage, flags: &[&str]) -> Look {
    Look::start(stage.run_command(flags, Path::new("python3")))
}

/// Looks until the daemon has heard of everything: use is told within a tenth of a second.
fn settled(tool: &mut Look, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    eventually(what, || {
        let seen = tool.ask("look");
        if wanted(&seen) {
            Ok(seen)
        } else {
            Err(seen.to_string())
        }
    })
}

/// What a context took is told by the daemon. A hundred programs that start NVML at the same moment wait for each other, and a program that ends while
/// a thread of its is starting NVML can die of that.
#[test]
fn a_program_under_a_daemon_starts_no_nvml_of_its_own() {
    let stage = Stage::new(Options::default());
    let mut program = job(&stage, &[]);
    program.ask("open 0");
    assert_eq!(program.ask(&format!("alloc {}", 20 * MIB)), 0);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.pid())).expect("its maps");
    assert!(
        maps.contains("libebb.so") && !maps.contains("libnvidia-ml"),
        "{maps}"
    );
    // The context is known all the same.
    let expected = json!([[program.pid(), 24 * MIB]]);
    settled(&mut program, "the context is counted", |seen| {
        seen[0]["used"] == 24 * MIB && seen[0]["processes"]["Compute"] == expected
    });
}

#[test]
fn nvml_inside_a_task_shows_the_task() {
    let stage = Stage::new(Options::default());
    let token = stage.task("job", Bytes::ZERO, Some(Bytes::mib(128)), Priority::Normal);
    let mut first = member(&stage, &token, &[]);
    let mut second = member(&stage, &token, &[]);
    let mut neighbour = job(&stage, &[]);
    for (program, size) in [(&mut first, 20), (&mut second, 30), (&mut neighbour, 60)] {
        program.ask("open 0");
        assert_eq!(program.ask(&format!("alloc {}", size * MIB)), 0);
    }
    // A tool that never starts the driver, as `nvidia-smi` does not.
    let mut tool = member(&stage, &token, &[]);
    let pids = [&first, &second].map(Look::pid);
    let mut expected = [json!([pids[0], 24 * MIB]), json!([pids[1], 34 * MIB])];
    expected.sort_by_key(|entry| entry[0].as_u64());
    let expected = json!(expected);
    let seen = settled(&mut tool, "both are shown with what they have", |seen| {
        seen[0]["processes"]["Compute"] == expected
    });
    let card = &seen[0];
    assert_eq!(card["total"], 128 * MIB, "the limit");
    assert_eq!(card["used"], 58 * MIB, "the sum of the list");
    assert_eq!(card["free"], 70 * MIB);
    assert_eq!(card["bar1_used"], 0);
    for form in ["Compute", "Compute_v2", "Compute_v3"] {
        assert_eq!(card["processes"][form], expected, "{form}");
    }
    for form in [
        "Graphics",
        "Graphics_v2",
        "Graphics_v3",
        "MPSCompute",
        "MPSCompute_v2",
        "MPSCompute_v3",
    ] {
        assert_eq!(card["processes"][form], json!([]), "{form}");
    }
    // What `nvidia-smi` reads: the same, with names.
    let named = expected.as_array().expect("a list").iter();
    let named: Vec<_> = named.map(|entry| json!([entry[0], entry[1], true])).collect();
    assert_eq!(card["private"], json!([named, [], []]));
    // Modes: compute, graphics, MPS, all.
    assert_eq!(card["details"], json!([expected, [], [], expected]));
    let mut own = pids.to_vec();
    own.sort_unstable();
    assert_eq!(card["utilisation"], json!([own, own]));
    assert_eq!(card["accounts"], json!(own));
    assert_eq!(
        tool.ask(&format!("account {}", pids[0])),
        json!([0, 24 * MIB, 0, 24 * MIB])
    );
    let foreign = neighbour.pid();
    assert_eq!(
        tool.ask(&format!("account {foreign}")),
        json!([6, 0, 6, 0]),
        "not found"
    );
    let name = tool.ask(&format!("name {}", pids[0]));
    assert!(
        name.as_str().is_some_and(|name| name.ends_with("python3")),
        "{name}"
    );
    // The programs themselves see the same, and by the driver too.
    for program in [&mut first, &mut second] {
        let seen = settled(program, "a program sees both", |seen| {
            seen[0]["processes"]["Compute"] == expected && seen[0]["used"] == 58 * MIB
        });
        assert_eq!(seen[0]["total"], 128 * MIB);
        assert_eq!(program.ask("info"), json!([70 * MIB, 128 * MIB]));
        assert_eq!(program.ask("total 0"), 128 * MIB);
    }
    // The neighbour sees itself alone, on a card that is all its own.
    let seen = settled(&mut neighbour, "a neighbour sees itself", |seen| {
        seen[0]["processes"]["Compute"] == json!([[foreign, 64 * MIB]])
    });
    assert_eq!(seen[0]["total"], 256 * MIB);
    assert_eq!(seen[0]["used"], 64 * MIB);
    // A program of no task sees the card as it is.
    let mut command = Command::new(python());
    stage.gpu_env(&mut command);
    let mut outside = Look::start(command);
    let seen = outside.ask("look");
    assert_eq!(seen[0]["processes"]["Compute"].as_array().map(Vec::len), Some(3));
    assert_eq!(seen[0]["total"], 256 * MIB);
}

#[test]
fn what_the_dead_held_is_gone_from_the_list_at_once() {
    let stage = Stage::new(Options::default());
    let token = stage.task("job", Bytes::ZERO, None, Priority::Normal);
    let mut first = member(&stage, &token, &[]);
    let mut tool = member(&stage, &token, &[]);
    first.ask("open 0");
    first.ask(&format!("alloc {}", 20 * MIB));
    settled(&mut tool, "it is shown", |seen| seen[0]["used"] == 24 * MIB);
    drop(first);
    let seen = settled(&mut tool, "it is gone", |seen| seen[0]["used"] == 0);
    assert_eq!(seen[0]["processes"]["Compute_v3"], json!([]));
}

/// Masks count for the driver and not for NVML: only the identity of a card says which one is meant.
#[test]
fn bug_146_memory_is_read_from_the_card_that_is_meant_under_every_mask() {
    let stage = Stage::new(Options {
        devices: 3,
        ..Options::default()
    });
    let uuids: Vec<String> = {
        let mut command = Command::new(python());
        stage.gpu_env(&mut command);
        let seen = Look::start(command).ask("look");
        let cards = seen.as_array().expect("a list of cards");
        cards
            .iter()
            .map(|card| card["uuid"].as_str().expect("a text").to_owned())
            .collect()
    };
    let by_uuid = format!("{},{}", uuids[2], uuids[0]);
    for (mask, used) in [("1", 1), ("2,1", 2), (by_uuid.as_str(), 2), ("0,2", 0)] {
        let mut command = stage.run_command(&["--limit", "100Mi"], Path::new("python3"));
        command.env("CUDA_VISIBLE_DEVICES", mask);
        let mut program = Look::start(command);
        program.ask("open 0");
        program.ask(&format!("alloc {}", 32 * MIB));
        let pid = program.pid();
        let seen = settled(&mut program, "the card in use shows it", |seen| {
            seen[used]["processes"]["Compute"] == json!([[pid, 36 * MIB]])
        });
        for (index, uuid) in uuids.iter().enumerate() {
            let card = &seen[index];
            assert_eq!(card["uuid"], uuid.as_str(), "NVML counts all cards in one order");
            assert_eq!(card["total"], 100 * MIB, "the limit is per card");
            let held = if index == used { 36 * MIB } else { 0 };
            assert_eq!(card["used"], held, "mask {mask}, card {index}");
            assert_eq!(
                card["processes"]["Compute_v2"].as_array().map(Vec::len),
                Some(usize::from(index == used))
            );
        }
    }
}

/// A program in a pid namespace of its own sees its own processes by the numbers that they have there.
#[test]
fn bug_142_a_container_lists_its_own_processes_by_its_own_numbers() {
    let container = [
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
    ];
    let allowed = Command::new("unshare").args(container).arg("true").output();
    if !allowed.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this machine allows no namespaces");
        return;
    }
    let stage = Stage::new(Options::default());
    let mut neighbour = job(&stage, &[]);
    neighbour.ask("open 0");
    neighbour.ask(&format!("alloc {}", 10 * MIB));
    let token = stage.task("boxed", Bytes::ZERO, Some(Bytes::mib(100)), Priority::Normal);
    let mut command = Command::new("unshare");
    command.args(container).arg("python3");
    inside(&stage, &token, &mut command);
    let mut program = Look::start(command);
    assert_eq!(program.ask("pid"), 1, "the first of its namespace");
    program.ask("open 0");
    program.ask(&format!("alloc {}", 32 * MIB));
    let seen = settled(&mut program, "it sees itself by its own number", |seen| {
        seen[0]["processes"]["Compute"] == json!([[1, 36 * MIB]])
    });
    assert_eq!(seen[0]["processes"]["Compute_v3"], json!([[1, 36 * MIB]]));
    let name = program.ask("name 1");
    assert!(
        name.as_str().is_some_and(|name| name.ends_with("python3")),
        "{name}"
    );
    assert_eq!(
        program.ask(&format!("name {}", neighbour.pid())),
        -6,
        "nobody here has that number"
    );
    // The host's view has the host's numbers.
    let mut outside = member(&stage, &token, &[]);
    let seen = settled(&mut outside, "the host sees one", |seen| {
        seen[0]["processes"]["Compute"]
            .as_array()
            .is_some_and(|list| list.len() == 1)
    });
    assert_ne!(seen[0]["processes"]["Compute"][0][0], 1);
}

/// The engine's formula for its cache: a share of the total, less what is used.
fn share(info: &Value, percent: u64) -> u64 {
    let (free, total) = (info[0].as_u64().expect("free"), info[1].as_u64().expect("total"));
    (total * percent / 100).saturating_sub(total - free)
}

#[test]
fn bug_044_a_share_of_the_memory_is_a_share_of_the_tasks_own() {
    let options = || Options {
        card: Bytes::mib(512),
        ..Options::default()
    };
    let sizes = |second_first: bool| {
        let stage = Stage::new(options());
        let mut engines: Vec<Look> = Vec::new();
        let mut order = [("300Mi", 75u64), ("120Mi", 90)];
        if second_first {
            order.reverse();
        }
        let mut got = Vec::new();
        for (limit, percent) in order {
            let mut engine = job(&stage, &["--limit", limit]);
            let info = engine.ask("open 0");
            let cache = share(&info, percent) / MIB / 2 * 2;
            assert!(cache > 0, "{limit}: {info}");
            assert_eq!(engine.ask(&format!("alloc {}", cache * MIB)), 0, "{limit}");
            got.push((limit, cache));
            engines.push(engine);
        }
        got.sort_unstable();
        got
    };
    assert_eq!(sizes(false), sizes(true), "who starts first decides nothing");
}

#[test]
fn bug_046_every_start_decides_alike_while_another_sleeps_and_wakes() {
    let stage = Stage::new(Options::default());
    let mut sleeper = job(&stage, &["--name", "sleeper"]);
    sleeper.ask("open 0");
    assert_eq!(sleeper.ask(&format!("alloc {}", 180 * MIB)), 0);
    let asleep = |wanted: bool| {
        let request = if wanted {
            Request::Pause {
                task: "sleeper".into(),
                wait_ms: Some(20_000),
            }
        } else {
            Request::Resume {
                task: "sleeper".into(),
            }
        };
        let answer = stage.ask(&request);
        assert!(matches!(answer, Answer::Ok(_)), "{answer:?}");
    };
    let mut decisions = Vec::new();
    for round in 0..6 {
        asleep(round % 2 == 0);
        let mut engine = job(&stage, &["--limit", "150Mi"]);
        let info = engine.ask("open 0");
        // While it profiles, the other one wakes or goes to sleep.
        asleep(round % 2 == 1);
        assert_eq!(
            engine.ask("info"),
            info,
            "round {round}: memory came or went by itself"
        );
        let cache = share(&info, 90);
        assert_eq!(engine.ask(&format!("alloc {}", cache / MIB / 2 * 2 * MIB)), 0);
        decisions.push(cache);
        drop(engine);
        // And the first one can wake.
        asleep(false);
        assert_eq!(sleeper.ask("free"), 0);
        assert_eq!(sleeper.ask(&format!("alloc {}", 180 * MIB)), 0);
    }
    decisions.dedup();
    assert_eq!(decisions.len(), 1, "{decisions:?}");
}

#[test]
fn bug_049_equal_slices_of_two_cards_look_alike_whoever_sits_on_one() {
    let stage = Stage::new(Options {
        devices: 2,
        ..Options::default()
    });
    let mut neighbour = job(&stage, &[]);
    neighbour.ask("open 1");
    assert_eq!(neighbour.ask(&format!("alloc {}", 150 * MIB)), 0);
    let mut engine = job(&stage, &["--limit", "200Mi"]);
    let first = engine.ask("open 0");
    let second = engine.ask("open 1");
    assert_eq!(first, second, "free and total of both cards");
    let seen = engine.ask("look");
    assert_eq!(
        (&seen[0]["free"], &seen[0]["total"]),
        (&seen[1]["free"], &seen[1]["total"])
    );
}

#[test]
fn bug_013_bug_050_each_takes_its_share_in_whatever_order_they_start() {
    let stage = Stage::new(Options {
        card: Bytes::mib(512),
        ..Options::default()
    });
    // Each has a slice, and takes nine tenths of what it sees, all at once.
    let mut tasks: Vec<Look> = (0..6).map(|_| job(&stage, &["--limit", "80Mi"])).collect();
    for task in &mut tasks {
        task.send("open 0");
    }
    let seen: Vec<Value> = tasks.iter_mut().map(Look::answer).collect();
    assert!(seen.iter().all(|info| *info == seen[0]), "{seen:?}");
    assert_eq!(seen[0][1], 80 * MIB, "the total is the limit");
    let size = seen[0][0].as_u64().expect("a number") * 9 / 10;
    for task in &mut tasks {
        task.send(&format!("alloc {size}"));
    }
    for task in &mut tasks {
        assert_eq!(task.answer(), 0, "nine tenths of its own slice");
    }
    // What is left of the slice cannot be exceeded.
    for task in &mut tasks {
        assert_eq!(task.ask(&format!("alloc {}", 80 * MIB)), 2);
    }
}

#[test]
fn bug_052_the_view_at_load_time_is_the_same_from_run_to_run() {
    let stage = Stage::new(Options::default());
    let view = |stage: &Stage| {
        let mut engine = job(stage, &["--limit", "200Mi"]);
        let info = engine.ask("open 0");
        // The tool's view and the driver's are one.
        let seen = engine.ask("look");
        assert_eq!(json!([seen[0]["free"], seen[0]["total"]]), info);
        info
    };
    let alone = view(&stage);
    let mut neighbour = job(&stage, &["--name", "neighbour"]);
    neighbour.ask("open 0");
    assert_eq!(neighbour.ask(&format!("alloc {}", 200 * MIB)), 0);
    assert_eq!(view(&stage), alone, "beside a resident neighbour");
    let pause = Request::Pause {
        task: "neighbour".into(),
        wait_ms: Some(20_000),
    };
    assert!(matches!(stage.ask(&pause), Answer::Ok(_)));
    assert_eq!(view(&stage), alone, "beside one whose memory is in the host");
    drop(neighbour);
    assert_eq!(view(&stage), alone, "alone again");
}

#[test]
fn bug_140_allocated_resident_cached_evicted_and_unmanaged_are_told_apart() {
    let stage = Stage::new(Options::default());
    let mut server = job(&stage, &["--name", "server"]);
    server.ask("open 0");
    server.ask(&format!("alloc {}", 100 * MIB));
    let row = || stage.snapshot().tasks[0].processes[0].clone();
    let until = |what: &str, wanted: &dyn Fn(&ebb_protocol::control::ProcessRow) -> bool| {
        eventually(what, || {
            let row = row();
            if wanted(&row) {
                Ok(row)
            } else {
                Err(format!("{row:?}"))
            }
        })
    };
    let mib = Bytes::mib;
    until("the model is loaded", &|row| {
        (row.allocated, row.resident, row.evicted) == (mib(100), mib(100), mib(0))
    });
    let pause = Request::Pause {
        task: "server".into(),
        wait_ms: Some(20_000),
    };
    assert!(matches!(stage.ask(&pause), Answer::Ok(_)));
    until("it is in the host", &|row| {
        (row.allocated, row.resident, row.evicted, row.cached) == (mib(100), mib(0), mib(100), mib(0))
    });
    let resume = Request::Resume {
        task: "server".into(),
    };
    assert!(matches!(stage.ask(&resume), Answer::Ok(_)));
    // Unloaded: nothing is allocated, and what stays on the card is cache, given to whoever asks.
    server.ask("free");
    let row = until("it is unloaded", &|row| {
        row.allocated.is_zero() && row.evicted.is_zero() && row.resident == row.cached
    });
    let card = stage.snapshot().devices[0].clone();
    assert_eq!((card.leased, card.unmanaged), (row.lease, Bytes::ZERO));
    // A program outside is neither of these.
    let mut command = Command::new(python());
    stage.gpu_env(&mut command);
    let mut outside = Look::start(command);
    outside.ask("open 0");
    outside.ask(&format!("alloc {}", 60 * MIB));
    eventually("the program outside is seen", || {
        let card = stage.snapshot().devices[0].clone();
        if card.unmanaged == mib(64) && card.strangers.len() == 1 {
            Ok(())
        } else {
            Err(format!("{card:?}"))
        }
    });
    assert!(row.allocated.is_zero());
}

/// The strict mode: what has no room now fails now, with the driver's code, and nobody is evicted for it.
#[test]
fn a_strict_program_oversubscribes_nothing() {
    let stage = Stage::new(Options::default());
    let mut neighbour = job(&stage, &["--name", "neighbour"]);
    neighbour.ask("open 0");
    assert_eq!(neighbour.ask(&format!("alloc {}", 150 * MIB)), 0);
    let mut strict = job(&stage, &["--strict", "--name", "strict"]);
    let info = strict.ask("open 0");
    // The card, less both contexts and what the neighbour has: what the driver itself says.
    assert_eq!(info, json!([(256 - 8 - 150) * MIB, 256 * MIB]));
    assert_eq!(strict.ask(&format!("alloc {}", 100 * MIB)), 2);
    assert_eq!(strict.ask("info"), info, "a refusal changes nothing");
    let snapshot = stage.snapshot();
    assert_eq!(snapshot.totals.releases, 0, "nobody was evicted");
    // What the ledger keeps for the next program's context is not given away either.
    let free = snapshot.devices[0].free.0;
    assert_eq!(
        strict.ask(&format!("alloc {free}")),
        0,
        "the last granule that is in nobody's hands"
    );
    assert_eq!(strict.ask(&format!("alloc {}", 2 * MIB)), 2);
    assert_eq!(stage.snapshot().totals.releases, 0);
    // A limit holds as ever, and what is freed can be had again.
    strict.ask("free");
    assert_eq!(strict.ask(&format!("alloc {free}")), 0);
    // Without the option the same request is met by an eviction.
    drop(strict);
    let mut lenient = job(&stage, &[]);
    lenient.ask("open 0");
    assert_eq!(lenient.ask(&format!("alloc {}", 150 * MIB)), 0);
    assert!(stage.snapshot().totals.releases > 0);
}

/// A module, and a kernel with much local memory: the driver takes memory and no call says how much.
#[test]
fn bug_116_what_the_driver_takes_by_itself_is_found_charged_and_held_against_the_limit() {
    const STACK: u32 = 0;
    let stage = Stage::new(Options::default());
    let mut command = stage.run_command(&["--limit", "150Mi", "--name", "greedy"], Path::new("python3"));
    command
        .env(
            "EBB_TEST_KERNELS",
            concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/simgpu/ptx/kernels.ptx"),
        )
        .env("EBB_SIM_MODULE_BYTES", "8Mi");
    let mut program = Look::start(command);
    let before = program.ask("open 0")[0].as_u64().expect("a number");
    let charged = |program: &mut Look, what: &str, mib: u64| {
        eventually(what, || {
            let row = stage.snapshot().tasks[0].processes[0].clone();
            let free = program.ask("info")[0].as_u64().expect("a number");
            if row.unseen == Bytes::mib(mib) && free == before - mib * MIB {
                Ok(())
            } else {
                Err(format!("{free} free, {row:?}"))
            }
        });
    };
    assert_eq!(program.ask("launch"), 0);
    charged(&mut program, "the module is charged", 8);
    // 2 KiB of stack beyond the usual for each of 8 times 2,048 threads, taken at the next launch.
    assert_eq!(program.ask(&format!("limit {STACK} {}", 3 << 10)), 0);
    assert_eq!(program.ask("launch"), 0);
    charged(&mut program, "so is local memory", 40);
    assert_eq!(
        program.ask(&format!("alloc {}", before - 38 * MIB)),
        2,
        "the quota holds"
    );
    assert_eq!(program.ask(&format!("alloc {}", before - 40 * MIB)), 0);
    // It is the program's, and cannot be moved: a pause leaves it.
    let pause = Request::Pause {
        task: "greedy".into(),
        wait_ms: Some(20_000),
    };
    assert!(matches!(stage.ask(&pause), Answer::Ok(_)));
    let device = stage.snapshot().devices[0].clone();
    // A granule more is the library's own: what it tells unchanged memory by.
    assert_eq!((device.leased, device.overhead), (Bytes::ZERO, Bytes::mib(46)));
    drop(program);
    eventually("it goes with the process", || {
        let device = stage.snapshot().devices[0].clone();
        if device.overhead.is_zero() {
            Ok(())
        } else {
            Err(format!("{device:?}"))
        }
    });
}

/// A library that is loaded with `RTLD_DEEPBIND` finds the driver before us: its memory is nobody's promise, and counts against its task.
#[test]
fn a_library_that_binds_past_us_is_seen_named_and_held_against_its_task() {
    let stage = Stage::new(Options::default());
    let (source, library) = (stage.folder().join("past.c"), stage.folder().join("libpast.so"));
    std::fs::write(
        &source,
        "int cuInit(unsigned); int cuDevicePrimaryCtxRetain(void **, int); int cuCtxSetCurrent(void *);\n\
         int cuMemAlloc_v2(unsigned long long *, unsigned long);\n\
         int take(unsigned long size)\n{\n    void *context; unsigned long long pointer; int code = cuInit(0);\n\
         \x20   if (!code) code = cuDevicePrimaryCtxRetain(&context, 0);\n    if (!code) code = cuCtxSetCurrent(context);\n\
         \x20   return code ? code : cuMemAlloc_v2(&pointer, size);\n}\n",
    )
    .expect("room");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .arg(Artefacts::get().sim.join("libcuda.so.1"))
        .status();
    assert!(built.expect("a C compiler is there").success());
    let token = stage.task("past", Bytes::ZERO, Some(Bytes::mib(100)), Priority::Normal);
    let mut program = member(&stage, &token, &[]);
    assert_eq!(
        program.ask(&format!("deepbind {} {}", library.display(), 50 * MIB)),
        0
    );
    let (row, task) = eventually("it is seen", || {
        let snapshot = stage.snapshot();
        let task = snapshot
            .tasks
            .iter()
            .find(|task| task.name == "past")
            .map(|task| task.task);
        match snapshot.devices[0].strangers.first() {
            Some(row) => Ok((row.clone(), task)),
            None => Err(format!("{snapshot:?}")),
        }
    });
    assert_eq!(
        (row.pid, row.bytes, row.task),
        (program.pid(), Bytes::mib(54), task)
    );
    assert!(row.why.contains("RTLD_DEEPBIND"), "{}", row.why);
    assert_eq!(stage.snapshot().devices[0].unmanaged, Bytes::mib(54));
    // A sibling has what is left of the limit.
    let mut sibling = member(&stage, &token, &[]);
    assert_eq!(sibling.ask("open 0"), json!([42 * MIB, 100 * MIB]));
    assert_eq!(sibling.ask(&format!("alloc {}", 44 * MIB)), 2);
    assert_eq!(sibling.ask(&format!("alloc {}", 42 * MIB)), 0);
}
