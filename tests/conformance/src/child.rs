//! The process that runs one behaviour, or several, and writes down what it saw.
//!
//! Lines of its file: `=label: value` of the observation, `?reason` if it is skipped, `!message` if it could not go on,
//! `#releases pauses refused` of the evictions, `.` at the end. A file without the last line is of a program that died.

use std::os::fd::FromRawFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use ebb_abi::{CUcontext, CUdevice, CUdevice_attribute, CUresult};

use crate::behaviour::{Behaviour, Need};
use crate::driver::{Driver, library};
use crate::helpers::unblock;
use crate::observe::{Skip, Test, begin};
use crate::{evict, groups};

/// Runs them, one after the other; the exit status. Of several, each has a file of its own name and starts in a new context.
pub(crate) fn behave(names: &[String], peer: bool, out: &Path) -> i32 {
    let [first, others @ ..] = names else { return 2 };
    let mut status = one(first, peer, out);
    for name in others {
        if status != 0 || !start_again() {
            return status;
        }
        status = one(name, peer, &beside(out, name));
    }
    status
}

/// The file of a further behaviour: that of the first one with another name before the way's.
pub(crate) fn beside(first: &Path, name: &str) -> PathBuf {
    let way = first.extension().unwrap_or_default().to_string_lossy();
    first.with_file_name(format!("{name}.{way}"))
}

/// Lets the context and all that is in it go, so that the next behaviour begins with a new one. Whether that is so.
fn start_again() -> bool {
    let cu = Driver;
    // A behaviour that could not go on may have left a stream waiting.
    unblock();
    let _ = cu.cuCtxSetCurrent(CUcontext::NULL);
    for _ in 0..8 {
        let (mut flags, mut active) = (0, 1);
        if cu.cuDevicePrimaryCtxGetState(CUdevice(0), &mut flags, &mut active) != CUresult::SUCCESS {
            return false;
        }
        if active == 0 {
            return true;
        }
        if cu.cuDevicePrimaryCtxRelease_v2(CUdevice(0)) != CUresult::SUCCESS {
            return false;
        }
    }
    false
}

fn one(name: &str, peer: bool, out: &Path) -> i32 {
    let Some(behaviour) = groups::all().find(|behaviour| behaviour.name == name) else {
        eprintln!("error: there is no behaviour {name}");
        return 2;
    };
    let mut test = match Test::new(behaviour.name, out.to_path_buf()) {
        Ok(test) => test,
        Err(error) => {
            eprintln!("error: {}: {error}", out.display());
            return 2;
        }
    };
    // A panic here is a result, not a message for a person.
    std::panic::set_hook(Box::new(|_| ()));
    let result = catch_unwind(AssertUnwindSafe(|| run(behaviour, peer, &mut test)));
    if let Some((releases, done, refused)) = evict::counted() {
        test.write(&format!("#{releases} {done} {refused}"));
    }
    if let Err(thrown) = result {
        if let Some(Skip(why)) = thrown.downcast_ref() {
            test.write(&format!("?{why}"));
        } else {
            let why = thrown
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| thrown.downcast_ref::<&str>().map(|text| (*text).to_owned()))
                .unwrap_or_default();
            test.write(&format!("!{}", why.replace('\n', " ")));
        }
    }
    if !peer {
        test.write(".");
    }
    0
}

fn run(behaviour: &Behaviour, peer: bool, test: &mut Test) {
    if let Err(why) = library() {
        test.skip(format!("no driver: {why}"));
    }
    if !behaviour.raw {
        begin(test);
    }
    for need in behaviour.needs {
        check(*need, test);
    }
    if peer {
        let other = behaviour
            .peer
            .expect("only behaviours with a second half start one");
        // SAFETY: the first process passed its end of a socket pair as our standard input, which nothing else uses.
        let socket = unsafe { UnixStream::from_raw_fd(0) };
        other(test, Driver, socket);
    } else {
        (behaviour.run)(test, Driver);
    }
}

fn check(need: Need, test: &mut Test) {
    let cu = Driver;
    let mut number = 0;
    match need {
        Need::SecondDevice => {
            let code = cu.cuDeviceGetCount(&mut number);
            test.ok("cuDeviceGetCount", code);
            if number < 2 {
                test.skip("needs a second device");
            }
        }
        Need::Attribute(attribute, words) => {
            let code = cu.cuDeviceGetAttribute(&mut number, CUdevice_attribute(attribute), CUdevice(0));
            test.ok("cuDeviceGetAttribute", code);
            if number == 0 {
                test.skip(format!("the device has no {words}"));
            }
        }
    }
}
