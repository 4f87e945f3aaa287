//! What `ebb doctor` shows of this process: a JSON object, written by hand so that no JSON library comes along into
//! other people's programs.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::core::Core;
use crate::device::{Device, Mode, State};
use crate::engine::ExternalKind;
use crate::link::Status;
use crate::pins::Held;
use crate::residency::movable_bytes;
use crate::{frameworks, sleep};

/// Writes objects and arrays; commas and escapes are its business.
#[derive(Debug, Default)]
struct Json {
    text: String,
    first: bool,
}

impl Json {
    fn comma(&mut self) {
        if !std::mem::take(&mut self.first) && !self.text.is_empty() {
            self.text.push(',');
        }
    }

    fn open(&mut self, bracket: char) {
        self.text.push(bracket);
        self.first = true;
    }

    fn close(&mut self, bracket: char) {
        self.text.push(bracket);
        self.first = false;
    }

    fn key(&mut self, key: &str) {
        self.comma();
        self.quoted(key);
        self.text.push(':');
    }

    fn quoted(&mut self, text: &str) {
        self.text.push('"');
        for c in text.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                c if u32::from(c) < 0x20 => {
                    let _ = write!(self.text, "\\u{:04x}", u32::from(c));
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }

    fn number(&mut self, key: &str, value: u64) {
        self.key(key);
        let _ = write!(self.text, "{value}");
    }

    fn string(&mut self, key: &str, value: &str) {
        self.key(key);
        self.quoted(value);
    }

    fn flag(&mut self, key: &str, value: bool) {
        self.key(key);
        self.text.push_str(if value { "true" } else { "false" });
    }

    fn object(&mut self, key: &str, with: impl FnOnce(&mut Self)) {
        self.key(key);
        self.open('{');
        with(self);
        self.close('}');
    }

    fn array(&mut self, key: &str, with: impl FnOnce(&mut Self)) {
        self.key(key);
        self.open('[');
        with(self);
        self.close(']');
    }

    fn item(&mut self, with: impl FnOnce(&mut Self)) {
        self.comma();
        self.open('{');
        with(self);
        self.close('}');
    }
}

/// The report, at most `bytes` long: old events are left out to fit.
pub(crate) fn json(core: &Core, bytes: usize) -> String {
    let (total, events) = core.events.latest();
    let mut skip = 0;
    loop {
        let text = write(core, total, &events[skip..]);
        if text.len() <= bytes || skip == events.len() {
            return text;
        }
        skip = events.len().min(skip + 1 + (events.len() - skip) / 2);
    }
}

fn write(core: &Core, total: u64, events: &[(std::time::Duration, String)]) -> String {
    let mut json = Json::default();
    json.open('{');
    json.string("version", env!("CARGO_PKG_VERSION"));
    json.string("program", &core.config.program);
    json.number(
        "pid",
        rustix::process::getpid()
            .as_raw_nonzero()
            .get()
            .unsigned_abs()
            .into(),
    );
    json.flag("passthrough", core.is_passthrough());
    json.object("connection", |json| connection(core, json));
    json.object("gate", |json| {
        json.number("passages", core.gate.passages());
        json.number("waiting", core.gate.waiters().into());
        json.number("captures", core.captures().into());
    });
    json.array("devices", |json| {
        for device in core.devices() {
            json.item(|json| write_device(core, &device, json));
        }
    });
    json.object("arena", |json| {
        let sums = core.arena.sums();
        json.number("bytes", sums.total);
        json.number("used", sums.used);
        json.number("kept", sums.kept);
        json.number("common_away", sums.common.0);
        json.number("common_kept", sums.common.1);
        json.number("registered", sums.registered);
        json.number("segments", sums.segments);
        json.number("arriving", sums.arriving);
        json.number("lost", sums.lost);
        json.number("on_disk", sums.away);
    });
    json.object("other_cards", |json| {
        let sums = core.arena.rooms.sums();
        json.number("bytes", sums.held);
        json.number("wanted_back", sums.wanted);
        json.number("lost", sums.lost);
        json.number("taken", sums.taken);
        json.number("moved_on", sums.moved_on);
    });
    json.object("sharing", |json| {
        let sums = core.share.sums();
        json.number("handles_given_out", sums.handles);
        json.number("opened_by_others", sums.lent);
        json.number("opened_here", sums.open);
        json.number("opened_here_bytes", sums.open_bytes);
    });
    json.object("hibernate", |json| {
        let (state, times) = core.sleep.facts();
        json.string("state", state);
        json.number("times", times);
        let reasons = sleep::reasons(core);
        json.flag("possible", reasons.is_empty());
        json.array("in_the_way", |json| {
            for reason in &reasons {
                json.comma();
                json.quoted(reason);
            }
        });
    });
    json.number("events_total", total);
    json.array("events", |json| {
        for (at, text) in events {
            json.item(|json| {
                json.number("ms", u64::try_from(at.as_millis()).unwrap_or(u64::MAX));
                json.string("text", text);
            });
        }
    });
    json.close('}');
    json.text
}

fn connection(core: &Core, json: &mut Json) {
    match core.link.status() {
        Status::Starting => json.string("state", "starting"),
        Status::Connected { session, task } => {
            json.string("state", "connected");
            json.number("session", session);
            json.number("task", task);
        }
        Status::Alone(why) => {
            json.string("state", "alone");
            json.string("why", &why);
        }
        Status::Refused(why) => {
            json.string("state", "refused");
            json.string("why", &why);
        }
    }
    let (bad, connections) = core.link.counters();
    json.number("connections", connections);
    json.number("bad_packets", bad);
}

/// What is pinned on a device: reasons, and bytes of each.
pub(crate) fn pinned(core: &Core, state: &State) -> BTreeMap<String, u64> {
    let bytes_held = |held| match held {
        Held::Handle(handle) => core.vmm.with(|table| table.len_of(handle)),
        Held::Span(_) | Held::Lent(_) => state.pool.bytes_held(held),
    };
    state.pool.pins.by_reason(bytes_held)
}

fn write_device(core: &Core, device: &Device, json: &mut Json) {
    let framework = frameworks::figures(core, device.index);
    let state = device.lock();
    let books = state.pool.books;
    json.number("index", device.index as u64);
    json.string("uuid", &device.uuid.to_string());
    json.number("total", device.total.get());
    json.number("granularity", state.pool.granule());
    let lacks = device.memory.lacks();
    if !lacks.is_empty() {
        json.string("lacks", lacks);
    }
    json.string("phase", state.phase.name());
    json.flag("dead", state.dead);
    json.string(
        "room",
        match state.mode {
            Mode::Alone => "the driver decides",
            Mode::Attaching => "the daemon was asked",
            Mode::Connected => "the daemon decides",
        },
    );
    if books.limit != u64::MAX {
        json.number("limit", books.limit);
    }
    json.number("charged", books.charged());
    json.number("charged_elsewhere", books.elsewhere);
    json.number("lease", books.lease);
    json.number("resident", books.used);
    json.number("allocated", books.allocated);
    json.number("allocations", state.pool.live_count());
    let (bytes, handles) = core.vmm.with(|table| table.sums(device.index));
    json.number("program_bytes", bytes);
    json.number("program_handles", handles);
    json.object("pools", |json| {
        let (reserved, used, idle) = core.streamed.sums(device.index);
        json.number("reserved", reserved);
        json.number("used", used);
        json.number("idle", idle);
    });
    if let Some(pool) = framework {
        json.object("framework_pool", |json| {
            json.number("requested", pool.front.requested);
            json.number("allocated", pool.front.allocated);
            json.number("reserved", pool.front.pool.reserved);
            json.number("idle", pool.front.pool.idle);
            json.number("external_fragmentation", pool.front.pool.external_fragmentation);
            json.number("map_calls", pool.front.pool.map_calls);
            json.number("granules_brought_together", pool.front.pool.meshed_total);
            json.number("bytes_copied_for_that", pool.front.pool.copied_total);
            json.number("refused", pool.refused);
        });
    }
    json.number("evicted", books.evicted);
    json.object("managed", |json| {
        json.number("bytes", books.managed);
        json.number("out", state.beside.out(core.gate.passages()));
        json.number("pushed", state.beside.pushed());
    });
    json.number("cached", books.cached);
    json.number("overhead", books.overhead + books.own);
    // What a reclaim could get, and what it could not, with reasons.
    json.number("releasable", movable_bytes(core, device, &state) + books.cached);
    json.array("pinned", |json| {
        for (reason, bytes) in pinned(core, &state) {
            json.item(|json| {
                json.string("reason", &reason);
                json.number("bytes", bytes);
            });
        }
        for (kind, bytes) in &state.external {
            if *bytes > 0 {
                json.item(|json| {
                    json.string("reason", kind.name());
                    json.number("bytes", *bytes);
                });
            }
        }
        let graphs = state.external.get(&ExternalKind::Graph).copied().unwrap_or(0);
        let kept = state.beside.graphs_kept().saturating_sub(graphs);
        if kept > 0 {
            json.item(|json| {
                json.string("reason", "kept by the driver for graphs");
                json.number("bytes", kept);
            });
        }
        if books.stuck > 0 {
            json.item(|json| {
                json.string("reason", "the driver did not take it back yet");
                json.number("bytes", books.stuck);
            });
        }
    });
    if let Some(failing) = state.failing {
        json.object("restore_fails", |json| {
            json.string("error", &failing.error.to_string());
            json.number("tries", failing.tries.into());
            let ms = failing.since.elapsed().as_millis();
            json.number("since_ms", u64::try_from(ms).unwrap_or(u64::MAX));
        });
    }
    let c = state.counters;
    json.object("counters", |json| {
        json.number("evictions", c.evictions);
        json.number("restores", c.restores);
        json.number("bytes_out", c.bytes_out);
        json.number("bytes_unchanged", c.bytes_unchanged);
        json.number("bytes_zero", c.bytes_zero);
        json.number("bytes_in", c.bytes_in);
        json.number("nanos_out", c.nanos_out);
        json.number("nanos_in", c.nanos_in);
        json.number("busy", c.busy);
        json.number("capturing", c.capturing);
        json.number("no_room", c.no_room);
        json.number("failed", c.failed);
        json.number("driver_errors", c.driver_errors);
        json.number("out_of_memory_answers", c.out_of_memory_answers);
    });
}
