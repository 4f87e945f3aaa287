//! `ebb top`: the cards and the tasks, live.
//!
//! Two threads feed one channel: answers of the daemon and keys of the terminal. The main thread owns the state
//! ([`view::View`]) and draws. Leaving it by any way gives the terminal back as it was.

pub(crate) mod view;

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{Sender, channel};

use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};
use ebb_protocol::control::{Payload, Request, Snapshot};

use crate::args::{Global, TopArgs};
use crate::client::{Client, unexpected};
use crate::error::{CliError, Result};
use view::View;

/// What the main thread waits for.
enum Input {
    /// daemon --listing--> screen
    Listing(Box<Snapshot>),
    /// daemon --end of listings--> screen
    Lost(CliError),
    /// terminal --key, resize--> screen
    Terminal(Event),
    /// command thread --what the daemon answered--> screen
    Answer(String),
}

/// `ebb top`.
pub(crate) fn top(global: &Global, args: &TopArgs) -> Result<()> {
    let interval_ms = u64::try_from(args.interval.as_millis()).unwrap_or(u64::MAX);
    let mut client = Client::open(global)?;
    client.send(&Request::Watch { interval_ms })?;
    if args.json {
        return stream(client);
    }
    if !std::io::stdout().is_terminal() {
        return Err(CliError::usage(
            "the output is not a terminal",
            "use `ebb top --json`, or `ebb ps` for one picture",
        ));
    }
    let (input_tx, input_rx) = channel();
    let listing_tx = input_tx.clone();
    std::thread::spawn(move || read_listings(client, &listing_tx));
    let key_tx = input_tx.clone();
    std::thread::spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            if key_tx.send(Input::Terminal(event)).is_err() {
                break;
            }
        }
    });
    let mut view = View::new(colourful());
    let mut terminal =
        ratatui::try_init().map_err(|error| CliError::failed(format!("cannot use the terminal: {error}")))?;
    let result = (|| {
        loop {
            terminal.draw(|frame| view.draw(frame)).map_err(CliError::from)?;
            match input_rx.recv() {
                Ok(Input::Listing(snapshot)) => view.show(*snapshot),
                Ok(Input::Lost(error)) => return Err(error),
                Ok(Input::Answer(text)) => view.say(text),
                Ok(Input::Terminal(event)) => {
                    if let Some(request) = match key(&event) {
                        Key::Quit => return Ok(()),
                        Key::Up => view.up(),
                        Key::Down => view.down(),
                        Key::Pause => view.chosen().map(|task| Request::Pause { task, wait_ms: None }),
                        Key::Resume => view.chosen().map(|task| Request::Resume { task }),
                        Key::None => None,
                    } {
                        view.say(asked(&request));
                        ask(global.clone(), request, input_tx.clone());
                    }
                }
                Err(_) => return Ok(()),
            }
        }
    })();
    ratatui::restore();
    result
}

/// `NO_COLOR` and dumb terminals get the same picture without colour.
fn colourful() -> bool {
    anstream::AutoStream::choice(&std::io::stdout()) != anstream::ColorChoice::Never
}

fn stream(mut client: Client) -> Result<()> {
    let mut out = std::io::stdout().lock();
    loop {
        let answer = client.next_answer()?;
        let Payload::List(snapshot) = answer else {
            return Err(unexpected(&answer));
        };
        serde_json::to_writer(&mut out, &snapshot)?;
        writeln!(out)?;
        out.flush()?;
    }
}

fn read_listings(mut client: Client, listing_tx: &Sender<Input>) {
    loop {
        let input = match client.next_answer() {
            Ok(Payload::List(snapshot)) => Input::Listing(Box::new(snapshot)),
            Ok(other) => Input::Lost(unexpected(&other)),
            Err(error) => Input::Lost(error),
        };
        let last = matches!(input, Input::Lost(_));
        if listing_tx.send(input).is_err() || last {
            return;
        }
    }
}

fn asked(request: &Request) -> String {
    match request {
        Request::Pause { task, .. } => format!("pausing {task} …"),
        Request::Resume { task } => format!("resuming {task} …"),
        _ => String::new(),
    }
}

/// Asks on a thread of its own: a pause may wait for a long kernel, and the picture must go on.
fn ask(global: Global, request: Request, answer_tx: Sender<Input>) {
    std::thread::spawn(move || {
        let text = match Client::open(&global).and_then(|mut client| client.ask(&request)) {
            Ok(Payload::Done { message }) => message,
            Ok(other) => unexpected(&other).to_string(),
            Err(error) => error.to_string().replace('\n', ";"),
        };
        let _ = answer_tx.send(Input::Answer(text));
    });
}

enum Key {
    Quit,
    Up,
    Down,
    Pause,
    Resume,
    None,
}

fn key(event: &Event) -> Key {
    let Event::Key(key) = event else { return Key::None };
    if key.kind == KeyEventKind::Release {
        return Key::None;
    }
    match key.code {
        KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => Key::Quit,
        KeyCode::Char('q') | KeyCode::Esc => Key::Quit,
        KeyCode::Char('k') | KeyCode::Up => Key::Up,
        KeyCode::Char('j') | KeyCode::Down => Key::Down,
        KeyCode::Char('p') => Key::Pause,
        KeyCode::Char('r') => Key::Resume,
        _ => Key::None,
    }
}
