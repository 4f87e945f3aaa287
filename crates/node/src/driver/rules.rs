//! Looks at the cards for the operator's rules, and does what they say.

use std::sync::atomic::Ordering;

use ebb_policy::Event;
use ebb_units::{DeviceId, Priority, TaskId};

use super::Driver;
use super::timers::Timer;
use crate::rules::notify::{MOST_WAITING, News};
use crate::rules::{Deed, EVERY, Rule, Sample};
use crate::say;

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
        self.after(wait.max(std::time::Duration::from_millis(10)), Timer::Rules);
    }

    fn follow(&mut self, rule: &Rule, device: DeviceId, sample: &Sample) {
        let card = self
            .devices
            .get(&device)
            .map_or_else(|| device.to_string(), |card| card.uuid.to_string());
        let text = format!(
            "{} of {} used, {} unmanaged, {} waiting; arena {} of {}",
            sample.used, sample.capacity, sample.unmanaged, sample.waiting, sample.arena.0, sample.arena.1
        );
        let deeds: Vec<String> = rule.deeds.iter().map(Deed::to_string).collect();
        let would = if rule.dry_run { "would do" } else { "does" };
        say::info!(
            "rule `{}` {would} {} on {card}: {text}",
            rule.name,
            deeds.join(", ")
        );
        if rule.dry_run {
            return;
        }
        for deed in &rule.deeds {
            match deed {
                Deed::Trim => self.feed(Event::Trim { device }),
                Deed::Shrink(priority) => self.feed(Event::Shrink {
                    device,
                    priority: *priority,
                }),
                Deed::Pause(whom) => self.pause_by_rule(whom, true),
                Deed::Resume(whom) => self.pause_by_rule(whom, false),
                Deed::Checkpoint(whom) => {
                    for task in self.meant(whom) {
                        self.give_way(task, super::news::BY_RULE);
                    }
                }
                Deed::Notify => self.notify(News {
                    rule: rule.name.clone(),
                    device: card.clone(),
                    text: text.clone(),
                    deeds: deeds.clone(),
                    dry_run: rule.dry_run,
                    unix_seconds: std::time::SystemTime::now()
                        .duration_since(std::time::UNIX_EPOCH)
                        .map_or(0, |since| since.as_secs()),
                }),
            }
        }
        self.settle();
    }

    /// Tasks by number, by name, or all of a priority.
    fn meant(&self, whom: &str) -> Vec<TaskId> {
        let priority: Option<Priority> = whom.parse().ok();
        let meant = self.tasks.iter().filter(|(id, task)| {
            id.to_string() == whom || task.name == whom || priority == Some(task.spec.priority)
        });
        meant.map(|(id, _)| *id).collect()
    }

    fn pause_by_rule(&mut self, whom: &str, pause: bool) {
        for task in self.meant(whom) {
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
            match crate::rules::notify::start(self.notices_waiting.clone()) {
                Ok(worker) => self.notices = Some(worker),
                Err(e) => return say::warning!("no thread for notifications: {e}"),
            }
        }
        if let Some(worker) = &self.notices {
            self.notices_waiting.fetch_add(1, Ordering::Relaxed);
            worker.send((config, news));
        }
    }
}
