//! The process that runs one behaviour and writes down what it saw.
//!
//! Lines of its file: `=label: value` of the observation, `?reason` if it is skipped, `!message` if it could not go on,
//! `#releases pauses refused` of the evictions, `.` at the end. A file without the last line is of a program that died.

use std::os::fd::FromRawFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ebb_abi::{CUdevice, CUdevice_attribute};

use crate::behaviour::{Behaviour, Need};
use crate::driver::{Driver, library};
use crate::observe::{Skip, Test, begin};
use crate::{evict, groups};

/// Runs it; the exit status.
pub(crate) fn behave(name: &str, peer: bool, out: &Path) -> i32 {
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
