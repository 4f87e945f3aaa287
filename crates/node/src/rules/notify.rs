//! Notifications: a command or a web address hears what a rule saw. A thread of its own; nothing waits for it.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::process::{Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::NotifyConfig;
use crate::group::Group;
use crate::say;
use crate::worker::{Answers, FromWorker, Worker};

/// A command that takes longer is ended.
const COMMAND_TIME: Duration = Duration::from_secs(10);
/// A web request takes at most this, once the address is known.
const WEB_TIME: Duration = Duration::from_secs(10);
/// News that wait for a slow receiver; what is more is dropped, and said.
pub(crate) const MOST_WAITING: u64 = 64;

/// What is told.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct News {
    /// The rule.
    pub rule: String,
    /// The card.
    pub device: String,
    /// What was seen, in words.
    pub text: String,
    /// What is done about it.
    pub deeds: Vec<String>,
    /// Seconds since 1970.
    pub unix_seconds: u64,
}

/// An address of plain HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Webhook {
    host: String,
    port: u16,
    path: String,
}

impl std::str::FromStr for Webhook {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix("http://") else {
            return Err(format!(
                "`{text}` does not begin with http://; for other ways use notify.command, with curl for instance"
            ));
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let bad = |c: char| c.is_whitespace() || c.is_control();
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => {
                let port = port.parse().map_err(|_| format!("`{port}` is no port"))?;
                (host, port)
            }
            _ => (authority, 80),
        };
        if host.is_empty() || text.contains(bad) || host.contains('@') {
            return Err(format!("`{text}` is no address"));
        }
        Ok(Self {
            host: host.into(),
            port,
            path: format!("/{path}"),
        })
    }
}

impl Webhook {
    fn post(&self, body: &str) -> Result<(), String> {
        let plain = self.host.trim_start_matches('[').trim_end_matches(']');
        let addresses = (plain, self.port).to_socket_addrs().map_err(|e| e.to_string())?;
        let deadline = Instant::now() + WEB_TIME;
        let mut last = "it has no address".to_string();
        for address in addresses {
            let Some(left) = left_until(deadline) else { break };
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return self.send(stream, body, deadline).map_err(|e| in_words(&e)),
                Err(e) => last = in_words(&e),
            }
        }
        Err(last)
    }

    fn send(&self, mut stream: TcpStream, body: &str, deadline: Instant) -> std::io::Result<()> {
        let late = || std::io::Error::from(std::io::ErrorKind::TimedOut);
        // Far less than a socket's buffer takes: it is written at once.
        stream.set_write_timeout(Some(left_until(deadline).ok_or_else(late)?))?;
        let request = format!(
            "POST {} HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            self.path,
            self.host,
            self.port,
            body.len()
        );
        stream.write_all(request.as_bytes())?;
        // "HTTP/1.1 204": all that is of interest. It may come in drops, for which there is no more time than for all of it.
        let (mut head, mut had) = ([0; 12], 0);
        while had < head.len() {
            stream.set_read_timeout(Some(left_until(deadline).ok_or_else(late)?))?;
            match stream.read(&mut head[had..]) {
                Ok(0) => return Err(std::io::Error::other("it hung up without an answer")),
                Ok(n) => had += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if head.starts_with(b"HTTP/1.") && head[9] == b'2' {
            return Ok(());
        }
        let answer = String::from_utf8_lossy(&head);
        let answer: String = answer.chars().filter(|c| !c.is_control()).collect();
        Err(std::io::Error::other(format!("it answered `{answer}`")))
    }
}

fn left_until(deadline: Instant) -> Option<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    (!left.is_zero()).then_some(left)
}

fn in_words(error: &std::io::Error) -> String {
    match error.kind() {
        // A timeout of a socket is told as either.
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            format!("no answer within {} s", WEB_TIME.as_secs())
        }
        _ => error.to_string(),
    }
}

fn run_command(command: &str, news: &News, body: &str) -> Result<(), String> {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", command])
        .env("EBB_RULE", &news.rule)
        .env("EBB_DEVICE", &news.device)
        .env("EBB_TEXT", &news.text)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // What the daemon takes as a message ends a command.
    let shell = crate::sys::unblocked(&mut shell, crate::daemon::SIGNALS.to_vec());
    let mut group = Group::start(shell).map_err(|e| e.to_string())?;
    if let Some(mut stdin) = group.input() {
        // A command that does not read is none the worse. The news fit into a pipe.
        let _ = stdin.write_all(body.as_bytes());
    }
    let deadline = Instant::now() + COMMAND_TIME;
    let mut pause = Duration::from_millis(1);
    while !group.is_over() && Instant::now() < deadline {
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
    let late = !group.is_over();
    if late {
        group.kill();
    }
    match group.wait() {
        _ if late => Err(format!(
            "it took longer than {} s and was ended",
            COMMAND_TIME.as_secs()
        )),
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(status.to_string()),
        Err(e) => Err(e.to_string()),
    }
}

/// One delivery, both ways that are set.
fn deliver(config: &NotifyConfig, news: &News) -> Vec<String> {
    let body = serde_json::to_string(news).unwrap_or_default();
    let mut troubles = Vec::new();
    if let Some(command) = &config.command
        && let Err(e) = run_command(command, news, &body)
    {
        troubles.push(format!("notify.command: {e}"));
    }
    if let Some(webhook) = &config.webhook
        && let Err(e) = webhook.post(&body)
    {
        troubles.push(format!("notify.webhook: {e}"));
    }
    troubles
}

/// The thread that delivers. It is not waited for: a receiver may hang.
pub(crate) fn start(
    waiting: std::sync::Arc<std::sync::atomic::AtomicU64>,
    answers: Answers,
) -> std::io::Result<Worker<(NotifyConfig, News)>> {
    Worker::start(
        "ebb-notify",
        false,
        move |queue: Receiver<(NotifyConfig, News)>| {
            while let Ok((config, news)) = queue.recv() {
                let troubles = deliver(&config, &news);
                for trouble in &troubles {
                    say::warning!("rule `{}`: {trouble}", news.rule);
                }
                let trouble = troubles.into_iter().next();
                answers.send(FromWorker::Notified { trouble });
                waiting.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
            }
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn news() -> News {
        News {
            rule: "full".into(),
            device: "GPU-1".into(),
            text: "used 95 of 100 GiB".into(),
            deeds: vec!["trim".into()],
            unix_seconds: 1,
        }
    }

    #[test]
    fn addresses_are_read() {
        let hook: Webhook = "http://localhost:9093/api/alerts?x=1".parse().unwrap();
        assert_eq!(
            (hook.host.as_str(), hook.port, hook.path.as_str()),
            ("localhost", 9093, "/api/alerts?x=1")
        );
        let hook: Webhook = "http://[::1]".parse().unwrap();
        assert_eq!(
            (hook.host.as_str(), hook.port, hook.path.as_str()),
            ("[::1]", 80, "/")
        );
        for text in [
            "https://x/",
            "http://",
            "http://a:b/",
            "http://a b/",
            "http://u@h/",
            "x",
        ] {
            assert!(text.parse::<Webhook>().is_err(), "{text}");
        }
    }

    /// All of a request with news: to hang up on what was not read would be told as an error of its own.
    fn request(stream: &mut TcpStream) -> String {
        let mut got = Vec::new();
        let mut piece = [0; 1024];
        while !got.ends_with(b"}") {
            let n = stream.read(&mut piece).unwrap();
            assert!(n > 0, "all of it comes");
            got.extend_from_slice(&piece[..n]);
        }
        String::from_utf8(got).unwrap()
    }

    #[test]
    fn a_web_address_is_posted_the_news() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let got = request(&mut stream);
            stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
            got
        });
        let config = NotifyConfig {
            command: None,
            webhook: Some(format!("http://127.0.0.1:{port}/hook").parse().unwrap()),
        };
        assert_eq!(deliver(&config, &news()), Vec::<String>::new());
        let got = server.join().unwrap();
        assert!(got.starts_with("POST /hook HTTP/1.1\r\n"), "{got}");
        assert!(got.contains("\"rule\":\"full\""), "{got}");
    }

    #[test]
    fn a_command_hears_the_news_and_its_failure_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("news");
        let config = |command: String| NotifyConfig {
            command: Some(command),
            webhook: None,
        };
        let command = format!("cat > '{0}' && echo \"$EBB_RULE\" >> '{0}'", file.display());
        assert_eq!(deliver(&config(command), &news()), Vec::<String>::new());
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(
            text.contains("used 95 of 100 GiB") && text.ends_with("full\n"),
            "{text}"
        );
        let troubles = deliver(&config("exit 3".into()), &news());
        assert_eq!(troubles, ["notify.command: exit status: 3"]);
        // What ends programs ends it, and not only the daemon.
        let troubles = deliver(&config("kill -TERM $$; sleep 600".into()), &news());
        assert_eq!(troubles, ["notify.command: signal: 15 (SIGTERM)"]);
    }

    #[test]
    fn an_address_that_answers_nothing_or_something_else_is_told() {
        let answer = |text: &'static str| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            let server = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = request(&mut stream);
                // In drops, until the other side has heard enough.
                for byte in text.as_bytes() {
                    if stream.write_all(&[*byte]).is_err() {
                        break;
                    }
                }
            });
            let hook: Webhook = format!("http://127.0.0.1:{port}/hook").parse().unwrap();
            let said = hook.post(&serde_json::to_string(&news()).unwrap());
            server.join().unwrap();
            said
        };
        assert_eq!(answer("HTTP/1.1 200 OK\r\n\r\n"), Ok(()));
        assert_eq!(
            answer("HTTP/1.1 500 Sorry\r\n\r\n").unwrap_err(),
            "it answered `HTTP/1.1 500`"
        );
        assert_eq!(answer("").unwrap_err(), "it hung up without an answer");
        let late = std::io::Error::from(std::io::ErrorKind::WouldBlock);
        assert_eq!(in_words(&late), "no answer within 10 s");
    }
}
