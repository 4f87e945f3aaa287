//! The picture of `ebb top`: a state, and how it is drawn. Knows no terminal, so that tests can look at it.

use std::collections::VecDeque;

use ebb_protocol::control::{DeviceRow, Request, Snapshot};
use ebb_units::Bytes;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;

use crate::commands::ps::gpu_name;
use crate::table::{harmless, per_second, rate, time};

/// Listings that the rates are taken over.
const RATE_OVER: usize = 5;

/// Listings that a message stays for.
const MESSAGE_STAYS: u32 = 8;

/// What is on the screen.
#[derive(Debug)]
pub(crate) struct View {
    snapshot: Snapshot,
    /// (uptime, bytes out, bytes in) of the last listings.
    history: VecDeque<(u64, u64, u64)>,
    chosen: usize,
    message: String,
    /// Listings until the message gives way to the keys.
    message_stays: u32,
    colourful: bool,
}

impl View {
    /// Nothing yet.
    pub(crate) fn new(colourful: bool) -> Self {
        Self {
            snapshot: Snapshot::default(),
            history: VecDeque::new(),
            chosen: 0,
            message: String::new(),
            message_stays: 0,
            colourful,
        }
    }

    /// A new listing.
    pub(crate) fn show(&mut self, snapshot: Snapshot) {
        let totals = &snapshot.totals;
        // A daemon that restarted counts from nothing again.
        if self
            .history
            .back()
            .is_some_and(|last| last.0 > snapshot.uptime_ms)
        {
            self.history.clear();
        }
        self.history
            .push_back((snapshot.uptime_ms, totals.out_bytes.0, totals.in_bytes.0));
        if self.history.len() > RATE_OVER {
            self.history.pop_front();
        }
        // The choice stays with its task, not with its line.
        let chosen = self.snapshot.tasks.get(self.chosen).map(|row| row.task);
        if let Some(at) = snapshot.tasks.iter().position(|row| Some(row.task) == chosen) {
            self.chosen = at;
        }
        self.chosen = self.chosen.min(snapshot.tasks.len().saturating_sub(1));
        self.snapshot = snapshot;
        self.message_stays = self.message_stays.saturating_sub(1);
        if self.message_stays == 0 {
            self.message.clear();
        }
    }

    /// The line at the bottom.
    pub(crate) fn say(&mut self, message: String) {
        self.message = harmless(&message);
        self.message_stays = MESSAGE_STAYS;
    }

    /// The task before.
    pub(crate) fn up(&mut self) -> Option<Request> {
        self.chosen = self.chosen.saturating_sub(1);
        None
    }

    /// The task after.
    pub(crate) fn down(&mut self) -> Option<Request> {
        self.chosen = (self.chosen + 1).min(self.snapshot.tasks.len().saturating_sub(1));
        None
    }

    /// The chosen task's id.
    pub(crate) fn chosen(&self) -> Option<String> {
        self.snapshot
            .tasks
            .get(self.chosen)
            .map(|row| row.task.to_string())
    }

    /// Bytes a second out and in, over the last listings.
    fn rates(&self) -> (f64, f64) {
        let (Some(first), Some(last)) = (self.history.front(), self.history.back()) else {
            return (0.0, 0.0);
        };
        let nanos = (last.0 - first.0) * 1_000_000;
        (
            per_second(last.1.saturating_sub(first.1), nanos),
            per_second(last.2.saturating_sub(first.2), nanos),
        )
    }

    fn style(&self, colour: Color) -> Style {
        if self.colourful {
            Style::new().fg(colour)
        } else {
            Style::new()
        }
    }

    /// Draws everything.
    pub(crate) fn draw(&self, frame: &mut Frame<'_>) {
        let cards = u16::try_from(self.snapshot.devices.len().max(1)).unwrap_or(u16::MAX);
        let [title, gpus, sums, _, head, tasks, detail, bottom] = Layout::vertical([
            Constraint::Length(1),
            // Many cards must not push the tasks off a small screen.
            Constraint::Length((cards * 2).min(frame.area().height / 2)),
            Constraint::Length(2),
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(1),
            Constraint::Length(1),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let heading = format!(
            "ebb top - {} tasks, daemon up {}",
            self.snapshot.tasks.len(),
            time(self.snapshot.uptime_ms)
        );
        frame.render_widget(Line::styled(heading, bold), title);
        frame.render_widget(Paragraph::new(self.cards(gpus.width)), gpus);
        frame.render_widget(Paragraph::new(self.sums()), sums);
        let columns = Columns::for_width(tasks.width);
        frame.render_widget(
            Line::styled(columns.head(), Style::new().add_modifier(Modifier::REVERSED)),
            head,
        );
        self.draw_tasks(frame, tasks, &columns);
        frame.render_widget(Line::raw(self.detail()), detail);
        let keys = if self.message.is_empty() {
            "up/down choose  p pause  r resume  q quit"
        } else {
            &self.message
        };
        frame.render_widget(
            Line::styled(keys, Style::new().add_modifier(Modifier::DIM)),
            bottom,
        );
    }

    fn cards(&self, width: u16) -> Vec<Line<'_>> {
        if self.snapshot.devices.is_empty() {
            return vec![Line::raw("no GPU is known yet")];
        }
        self.snapshot
            .devices
            .iter()
            .flat_map(|device| self.card(device, width))
            .collect()
    }

    /// Two lines a card: what it is, and a bar of who holds it.
    fn card(&self, device: &DeviceRow, width: u16) -> [Line<'_>; 2] {
        let name = format!("{} {}  {}", device.index, harmless(&device.name), device.total);
        let figures = format!(
            "granted {}  free {}  peak {}",
            device.leased, device.free, device.peak
        );
        let room = usize::from(width).saturating_sub(2);
        let parts = [
            (device.leased, '#', Color::Green),
            (device.overhead, '+', Color::Yellow),
            (device.unmanaged, '!', Color::Red),
        ];
        let mut spans = vec![Span::raw("[")];
        let mut used = 0;
        for (bytes, mark, colour) in parts {
            let cells = cells(bytes, device.total, room).min(room - used);
            spans.push(Span::styled(mark.to_string().repeat(cells), self.style(colour)));
            used += cells;
        }
        spans.push(Span::raw(".".repeat(room - used)));
        spans.push(Span::raw("]"));
        let gap = usize::from(width)
            .saturating_sub(name.chars().count() + figures.chars().count())
            .max(2);
        [
            Line::raw(format!("{name}{}{figures}", " ".repeat(gap))),
            Line::from(spans),
        ]
    }

    fn sums(&self) -> Vec<Line<'_>> {
        let (out, back) = self.rates();
        let (arena, totals) = (&self.snapshot.arena, &self.snapshot.totals);
        vec![
            Line::raw(format!(
                "# granted  + overhead  ! unmanaged  . free    arena {} of {}",
                arena.held, arena.budget
            )),
            Line::raw(format!(
                "out {}  in {}  releases {}  restores {}  refused {}",
                rate(out),
                rate(back),
                totals.releases,
                totals.restores,
                totals.denials
            )),
        ]
    }

    /// The chosen task in full: what its line may have no room for.
    fn detail(&self) -> String {
        let Some(task) = self.snapshot.tasks.get(self.chosen) else {
            return String::new();
        };
        let limit = task
            .limit
            .map_or_else(|| "the card".into(), |limit| limit.to_string());
        let why = task
            .processes
            .iter()
            .map(|process| process.why.as_str())
            .find(|why| !why.is_empty());
        let why = why.map(|why| format!(": {}", harmless(why))).unwrap_or_default();
        format!("{} request {}, limit {limit}{why}", task.task, task.request)
    }

    fn draw_tasks(&self, frame: &mut Frame<'_>, area: Rect, columns: &Columns) {
        let mut lines = Vec::new();
        let mut chosen_at = 0;
        for (i, task) in self.snapshot.tasks.iter().enumerate() {
            let style = if i == self.chosen {
                Style::new().add_modifier(Modifier::BOLD)
            } else {
                Style::new()
            };
            let mark = if i == self.chosen { '>' } else { ' ' };
            if i == self.chosen {
                chosen_at = lines.len();
            }
            let head = format!("{mark}{}", task.task);
            if task.processes.is_empty() {
                let state = if task.paused { "paused" } else { "starting" };
                let cells = [
                    &head,
                    &task.name,
                    task.priority.as_str(),
                    "-",
                    "-",
                    state,
                    "-",
                    "-",
                    "",
                ];
                lines.push(Line::styled(columns.line(cells), style));
            }
            for process in &task.processes {
                let (pid, gpu) = (process.pid.to_string(), gpu_name(&self.snapshot, process.device));
                let (here, away) = (process.resident.to_string(), process.evicted.to_string());
                let cells = [
                    &head,
                    &task.name,
                    task.priority.as_str(),
                    &pid,
                    &gpu,
                    &process.state,
                    &here,
                    &away,
                    &process.why,
                ];
                let style = style.patch(self.style(state_colour(&process.state)));
                lines.push(Line::styled(columns.line(cells), style));
            }
        }
        if lines.is_empty() {
            lines.push(Line::raw("no tasks; `ebb run -- PROGRAM` makes one"));
        }
        // Scrolled so far that the chosen task can be seen.
        let first = (chosen_at + 1).saturating_sub(usize::from(area.height).max(1));
        frame.render_widget(Paragraph::new(lines.split_off(first.min(lines.len()))), area);
    }
}

fn state_colour(state: &str) -> Color {
    match state {
        "active" => Color::Green,
        "waiting" | "restoring" | "evicting" => Color::Yellow,
        "not_connected" => Color::Red,
        _ => Color::Reset,
    }
}

/// How much of a bar something fills; what is there at all shows.
fn cells(bytes: Bytes, total: Bytes, room: usize) -> usize {
    if bytes.is_zero() || total.is_zero() {
        return 0;
    }
    let cells = u128::from(bytes.0) * room as u128 / u128::from(total.0);
    usize::try_from(cells).unwrap_or(room).clamp(1, room.max(1))
}

/// The widths of the columns: names and reasons take what the screen leaves.
struct Columns([usize; 9]);

const HEADS: [&str; 9] = [
    " TASK", "NAME", "PRIO", "PID", "GPU", "STATE", "ON CARD", "IN HOST", "WHY",
];
/// Figures keep to the right.
const FIGURES: [bool; 9] = [false, false, false, true, false, false, true, true, false];

impl Columns {
    fn for_width(width: u16) -> Self {
        let mut widths = [5, 10, 6, 7, 3, 13, 9, 9, 0];
        let fixed: usize = widths.iter().sum::<usize>() + widths.len() - 1;
        let spare = usize::from(width).saturating_sub(fixed);
        // A reason in a few letters says nothing: the line below the list has it in full.
        let name = if spare < 30 { spare } else { 14 };
        widths[1] += name;
        widths[8] = spare - name;
        Self(widths)
    }

    fn head(&self) -> String {
        let line = self.line(HEADS);
        let full = self.0.iter().sum::<usize>() + self.0.len() - 1;
        format!("{line:full$}")
    }

    fn line(&self, cells: [&str; 9]) -> String {
        let mut line = String::new();
        for (i, (cell, width)) in cells.iter().zip(self.0).enumerate() {
            if i > 0 {
                line.push(' ');
            }
            let text: String = harmless(cell).chars().take(width).collect();
            line.push_str(&if FIGURES[i] {
                format!("{text:>width$}")
            } else {
                format!("{text:<width$}")
            });
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn picture(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn busy() -> View {
        let mut view = View::new(false);
        let mut earlier = fixtures::busy();
        earlier.uptime_ms -= 2_000;
        earlier.totals.out_bytes = Bytes::gib(350);
        view.show(earlier);
        view.show(fixtures::busy());
        view
    }

    #[test]
    fn eighty_by_twenty_four() {
        insta::assert_snapshot!(picture(&busy(), 80, 24));
    }

    #[test]
    fn a_wide_screen_has_room_for_reasons() {
        insta::assert_snapshot!(picture(&busy(), 140, 16));
    }

    #[test]
    fn nothing_there() {
        insta::assert_snapshot!(picture(&View::new(true), 80, 12));
    }

    #[test]
    fn no_size_of_screen_panics() {
        for (width, height) in [(1, 1), (2, 2), (10, 3), (79, 5), (300, 2), (3, 60)] {
            let _ = picture(&busy(), width, height);
        }
    }

    #[test]
    fn the_choice_stays_with_its_task() {
        let mut view = busy();
        view.down();
        assert_eq!(view.chosen().as_deref(), Some("t2"));
        let mut later = fixtures::busy();
        later.tasks.remove(0);
        view.show(later);
        assert_eq!(view.chosen().as_deref(), Some("t2"));
        view.down();
        view.down();
        assert_eq!(view.chosen().as_deref(), Some("t3"));
        view.show(Snapshot::default());
        assert_eq!(view.chosen(), None);
    }

    #[test]
    fn a_restarted_daemon_does_not_upset_the_rates() {
        let mut view = busy();
        view.show(Snapshot {
            uptime_ms: 5,
            ..Snapshot::default()
        });
        assert_eq!(view.rates(), (0.0, 0.0));
    }
}
