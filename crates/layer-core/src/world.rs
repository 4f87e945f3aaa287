//! [`ask`]: what a task has on a card, asked by a process that may have no engine, as `nvidia-smi` has none.
//!
//! One connection a question, closed at once: nothing to keep, nothing that a fork or a program that closes descriptors could spoil, and no
//! lock. Bounded: a daemon that does not answer costs a second, once; then the driver's own answer stands.

use std::time::Duration;

use ebb_protocol::ToDaemon;
use ebb_protocol::socket;
use ebb_protocol::wire::ToLayer;
pub use ebb_protocol::wire::WorldProcess;
use ebb_units::{Bytes, DeviceUuid};

use crate::config::Config;
use crate::fd::OurFd;

/// For each step of the conversation.
const PATIENCE: Duration = Duration::from_secs(1);
/// Packets that are not the answer: a newer daemon may have something to say first.
const OTHERS: usize = 8;

/// A task's part of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Its limit, `None` if it may have the card.
    pub limit: Option<Bytes>,
    /// What all its processes are charged with.
    pub charged: Bytes,
    /// Its processes there that this process can name.
    pub processes: Vec<WorldProcess>,
}

/// Asks the first daemon that listens. `None`: none, or it knows no task of ours.
#[must_use]
pub fn ask(config: &Config, device: DeviceUuid) -> Option<World> {
    config
        .sockets
        .iter()
        .find_map(|path| Some(OurFd::new(socket::connect_within(path, PATIENCE).ok()?)))
        .and_then(|socket| talk(&socket, config.token, device))
}

/// What the daemon sees that this process has on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// So much.
    Bytes(Bytes),
    /// It cannot see it.
    Unseen,
    /// It did not answer in time.
    Silent,
}

/// Asks what this process has on a card, by the driver's own account.
#[must_use]
pub fn held(config: &Config, device: DeviceUuid) -> Seen {
    let connections = config.sockets.iter();
    let connection = connections
        .filter_map(|path| Some(OurFd::new(socket::connect_within(path, PATIENCE).ok()?)))
        .next();
    let Some(connection) = connection else {
        return Seen::Unseen;
    };
    let answer = exchange(
        &connection,
        &ToDaemon::AskHeld { device },
        |message| match message {
            ToLayer::Held {
                device: about,
                known,
                bytes,
            } if about == device => Some(if known { Seen::Bytes(bytes) } else { Seen::Unseen }),
            _ => None,
        },
    );
    answer.unwrap_or(Seen::Silent)
}

fn talk(connection: &OurFd, token: [u8; 32], device: DeviceUuid) -> Option<World> {
    let question = ToDaemon::AskWorld { token, device };
    exchange(connection, &question, |message| match message {
        ToLayer::World {
            device: about,
            known,
            limit,
            charged,
            processes,
        } if about == device => Some(known.then_some(World {
            limit: (limit != Bytes::MAX).then_some(limit),
            charged,
            processes,
        })),
        _ => None,
    })
    .flatten()
}

/// Asks, and waits for the message that is the answer.
fn exchange<T>(connection: &OurFd, question: &ToDaemon, answer: impl Fn(ToLayer) -> Option<T>) -> Option<T> {
    socket::send(connection.get()?, &question.encode().ok()?, &[]).ok()?;
    for _ in 0..OTHERS {
        let packet = socket::recv(connection.get()?).ok()??.packet;
        match ToLayer::decode(&packet) {
            // An older daemon takes the question for nonsense and says nothing.
            Ok(ToLayer::Refused { .. }) => return None,
            Ok(message) => {
                if let Some(found) = answer(message) {
                    return Some(found);
                }
            }
            Err(error) if error.is_skippable() => {}
            Err(_) => return None,
        }
    }
    None
}
