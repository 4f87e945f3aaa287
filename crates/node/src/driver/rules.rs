//! Looks at the cards for the operator's rules, and does what they say.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ebb_policy::{Event, Time};
use ebb_protocol::control::{Answer, FiredRow, Payload, RuleCardRow, RuleRow, Trouble};
use ebb_units::{DeviceId, Priority, TaskId};

use super::Driver;
use super::timers::Timer;
use crate::rules::notify::{MOST_WAITING, News};
use crate::rules::{Deed, EVERY, Phase, Rule, Sample};
use crate::say;

/// What rules did is remembered so often.
const KEPT: usize = 64;

/// That a rule fired, for `ebb rules`.
#[derive(Debug)]
pub(super) struct Fired {
    at: Time,
    rule: String,
    gpu: u32,
    text: String,
    done: String,
    dry_run: bool,
}

/// Whom a deed meets.
#[derive(Debug)]
struct Plan {
    tasks: Vec<TaskId>,
    said: Option<String>,
}

impl Driver {
    /// Goes on with the rules of the settings.
    pub(super) fn set_rules(&mut self) {
        self.rules.set(self.config.rules.clone());
        if !self.rules.is_empty() && !self.rules_timed {
            self.rules_timed = true;
            self.after(EVERY, Timer::Rules);
        }
    }

    /// Weighs tenants as the settings say; those that were in them before and are not any more weigh 1.
    pub(super) fn set_tenants(&mut self, before: std::collections::BTreeMap<u32, u32>) {
        let mut weights = self.config.tenants.clone();
        for tenant in before.into_keys() {
            weights.entry(tenant).or_insert(1);
        }
        for (tenant, weight) in weights {
            self.feed(Event::Tenant {
                tenant: ebb_policy::Tenant(tenant),
                weight,
            });
        }
    }

    /// A look at all cards. Comes again by itself as long as there are rules.
    pub(super) fn look_for_rules(&mut self) {
        self.rules_timed = false;
        if self.rules.is_empty() {
            return;
        }
        let view = self.arbiter.snapshot();
        let arena = (self.arena.lent(), self.arena.budget());
        let now = self.now();
        let mut fired: Vec<(Rule, DeviceId, Sample)> = Vec::new();
        for device in &view.devices {
            let clients = view.tasks.iter().flat_map(|task| &task.clients);
            let waiting = clients.filter(|c| c.device == device.device && !c.asked.is_zero());
            let sample = Sample {
                capacity: device.capacity,
                used: device.capacity.saturating_sub(device.free),
                unmanaged: device.unmanaged,
                waiting: waiting.count() as u64,
                arena,
            };
            for rule in self.rules.look(now, device.device, &sample) {
                fired.push((rule.clone(), device.device, sample));
            }
        }
        for (rule, device, sample) in fired {
            self.follow(&rule, device, &sample);
        }
        self.rules_timed = true;
        let wait = self
            .rules
            .next()
            .map_or(EVERY, |at| at.since(self.now()).min(EVERY));
        self.after(wait.max(Duration::from_millis(10)), Timer::Rules);
    }

    fn follow(&mut self, rule: &Rule, device: DeviceId, sample: &Sample) {
        let known = self.devices.get(&device);
        let uuid = known.map_or_else(|| device.to_string(), |card| card.uuid.to_string());
        let gpu = known.map_or(device.0, |card| card.index);
        let text = format!(
            "{} of {} used, {} unmanaged, {} waiting; arena {} of {}",
            sample.used, sample.capacity, sample.unmanaged, sample.waiting, sample.arena.0, sample.arena.1
        );
        let plans: Vec<(&Deed, Plan)> = rule
            .deeds
            .iter()
            .map(|deed| (deed, self.plan(deed, device)))
            .collect();
        let deeds: Vec<String> = plans
            .iter()
            .map(|(deed, plan)| match &plan.said {
                Some(said) => format!("{deed} ({said})"),
                None => deed.to_string(),
            })
            .collect();
        let would = if rule.dry_run { "would do" } else { "does" };
        let said = deeds.join(", ");
        say::info!(
            "rule `{}` {would} {said} on GPU {gpu} ({uuid}): {text}",
            rule.name
        );
        self.fired.push_back(Fired {
            at: self.now(),
            rule: rule.name.clone(),
            gpu,
            text: text.clone(),
            done: said,
            dry_run: rule.dry_run,
        });
        while self.fired.len() > KEPT {
            self.fired.pop_front();
        }
        if rule.dry_run {
            return;
        }
        for (deed, plan) in plans {
            match deed {
                Deed::Trim => self.feed(Event::Trim { device }),
                Deed::Shrink(priority) => self.feed(Event::Shrink {
                    device,
                    priority: *priority,
                }),
                Deed::Pause(_) => self.pause_by_rule(rule, &plan.tasks, true),
                Deed::Resume(_) => self.pause_by_rule(rule, &plan.tasks, false),
                Deed::Checkpoint(_) => {
                    for task in plan.tasks {
                        self.give_way(task, super::news::BY_RULE);
                        let within = super::news::BY_RULE.as_secs();
                        let text = format!("is to give way within {within} s: rule `{}`", rule.name);
                        self.decided(task, text);
                    }
                }
                Deed::Notify => self.notify(News {
                    rule: rule.name.clone(),
                    device: uuid.clone(),
                    text: text.clone(),
                    deeds: deeds.clone(),
                    unix_seconds: std::time::SystemTime::now()
                        .duration_since(std::time::UNIX_EPOCH)
                        .map_or(0, |since| since.as_secs()),
                }),
            }
        }
        self.settle();
    }

    /// Whom a deed meets, and what is worth saying of that.
    fn plan(&self, deed: &Deed, device: DeviceId) -> Plan {
        let named = |tasks: &[TaskId]| -> Option<String> {
            let names: Vec<String> = tasks.iter().map(|task| self.called(*task)).collect();
            Some(names.join(", "))
        };
        let (tasks, said) = match deed {
            Deed::Trim => (Vec::new(), None),
            Deed::Notify => {
                let nobody = self.config.notify.command.is_none() && self.config.notify.webhook.is_none();
                let said = "nobody: there is no notify.command or notify.webhook";
                (Vec::new(), nobody.then(|| said.into()))
            }
            Deed::Shrink(priority) => {
                let on_card = |task: &TaskId| {
                    let peers = || self.peers.values().filter(|peer| peer.task == *task);
                    peers().any(|peer| peer.clients.contains_key(&device))
                };
                let all = self.tasks.iter().filter(|(_, t)| t.spec.priority == *priority);
                let tasks: Vec<TaskId> = all.map(|(id, _)| *id).filter(on_card).collect();
                let said = match tasks.is_empty() {
                    true => Some("nobody of that priority is on the card".into()),
                    false => named(&tasks),
                };
                (tasks, said)
            }
            Deed::Pause(whom) | Deed::Resume(whom) | Deed::Checkpoint(whom) => {
                let tasks = self.meant(whom);
                let deaf: Vec<TaskId> = match deed {
                    Deed::Checkpoint(_) => tasks.iter().copied().filter(|t| !self.gives_way(*t)).collect(),
                    _ => Vec::new(),
                };
                let said = match (tasks.is_empty(), deaf.is_empty()) {
                    (true, _) => Some(format!("nobody is called `{whom}`")),
                    (false, true) => named(&tasks),
                    (false, false) => Some(format!(
                        "{}; without `ebb run --checkpoint`, so not told: {}",
                        named(&tasks).unwrap_or_default(),
                        named(&deaf).unwrap_or_default()
                    )),
                };
                (tasks, said)
            }
        };
        Plan { tasks, said }
    }

    /// Tasks by number, by name, or all of a priority.
    fn meant(&self, whom: &str) -> Vec<TaskId> {
        let priority: Option<Priority> = whom.parse().ok();
        let meant = self.tasks.iter().filter(|(id, task)| {
            id.to_string() == whom || task.name == whom || priority == Some(task.spec.priority)
        });
        meant.map(|(id, _)| *id).collect()
    }

    fn pause_by_rule(&mut self, rule: &Rule, tasks: &[TaskId], pause: bool) {
        for task in tasks.iter().copied() {
            let done = if pause { "paused" } else { "resumed" };
            self.decided(task, format!("{done} by rule `{}`", rule.name));
            if let Some(known) = self.tasks.get_mut(&task) {
                known.paused = pause;
            }
            self.state_dirty = true;
            self.feed(if pause {
                Event::Pause { task }
            } else {
                Event::Resume { task }
            });
        }
    }

    fn notify(&mut self, news: News) {
        let config = self.config.notify.clone();
        if config.command.is_none() && config.webhook.is_none() {
            return say::warning!(
                "rule `{}` notifies, but there is no notify.command or notify.webhook",
                news.rule
            );
        }
        if self.notices_waiting.load(Ordering::Relaxed) >= MOST_WAITING {
            return say::warning!(
                "rule `{}`: notifications wait for a slow receiver; this one is dropped",
                news.rule
            );
        }
        if self.notices.is_none() {
            match crate::rules::notify::start(self.notices_waiting.clone(), self.answers.clone()) {
                Ok(worker) => self.notices = Some(worker),
                Err(e) => return say::warning!("no thread for notifications: {e}"),
            }
        }
        if let Some(worker) = &self.notices {
            self.notices_waiting.fetch_add(1, Ordering::Relaxed);
            worker.send((config, news));
        }
    }

    /// All rules, where they stand, and what they did.
    pub(super) fn tell_rules(&self) -> Answer {
        let now = self.now();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let rules = self.rules.rules().iter().enumerate().map(|(n, rule)| RuleRow {
            name: rule.name.clone(),
            when: rule.when.to_string(),
            deeds: rule.deeds.iter().map(Deed::to_string).collect(),
            margin_thousandths: rule.margin,
            rest_ms: millis(rule.rest),
            dry_run: rule.dry_run,
            cards: self
                .devices
                .iter()
                .map(|(device, card)| {
                    let standing = self.rules.standing(n, *device);
                    let (state, since) = match standing.phase {
                        Phase::Quiet => ("quiet", None),
                        Phase::Pending(since) => ("pending", Some(since)),
                        Phase::Fired => ("fired", standing.last),
                    };
                    RuleCardRow {
                        gpu: card.index,
                        state: state.into(),
                        since_ms: since.map(|at| millis(now.since(at))),
                        fired: standing.fired,
                        last_ms: standing.last.map(|at| millis(now.since(at))),
                    }
                })
                .collect(),
        });
        let fired = self.fired.iter().map(|fired| FiredRow {
            ago_ms: millis(now.since(fired.at)),
            rule: fired.rule.clone(),
            gpu: fired.gpu,
            text: fired.text.clone(),
            done: fired.done.clone(),
            dry_run: fired.dry_run,
        });
        Answer::Ok(Payload::Rules {
            config: self.config_path.as_ref().map(|path| path.display().to_string()),
            rules: rules.collect(),
            fired: fired.collect(),
            troubles: self.rule_troubles(),
        })
    }

    /// What keeps rules from doing what their operator thinks that they do.
    pub(super) fn rule_troubles(&self) -> Vec<Trouble> {
        let mut troubles = Vec::new();
        if let Some(trouble) = &self.settings_trouble {
            troubles.push(Trouble {
                found: format!("a change of the settings is refused, and the old ones hold: {trouble}"),
                fix: "mend the file, then `ebb daemon --reload`".into(),
            });
        }
        if let Some(trouble) = &self.notify_trouble {
            troubles.push(Trouble {
                found: format!("the last notification of a rule did not arrive: {trouble}"),
                fix: "check `[notify]` in ebb.toml, and who listens there".into(),
            });
        }
        troubles
    }
}
