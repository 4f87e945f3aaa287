//! What settings are read as, and what is said of wrong ones.

use super::*;
use crate::budget::CgroupMemory;

fn around() -> Surroundings {
    Surroundings {
        uid: 7,
        home: Some("/home/u".into()),
        ..Surroundings::default()
    }
}

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("ebb.toml"), &around())
}

#[test]
fn the_example_is_the_default_and_lists_every_setting() {
    let plain = parse("").unwrap();
    assert_eq!(parse(Config::example()).unwrap(), plain);
    // With the `#` of the settings gone it must still be a valid file: no name in it is wrong.
    let all: String = Config::example()
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(rest)
                if rest
                    .split_once(" = ")
                    .is_some_and(|(name, _)| !name.contains(' ')) =>
            {
                format!("{rest}\n")
            }
            _ => format!("{line}\n"),
        })
        .collect();
    let full = parse(&all).unwrap();
    assert_eq!(full.policy, plain.policy);
    assert_eq!(full.busy_wait, plain.busy_wait);
    assert_eq!(
        (full.scope, full.idle_exit, full.nvml),
        (plain.scope, plain.idle_exit, plain.nvml)
    );
    assert_eq!(full.arena.segment, plain.arena.segment);
    assert_eq!(
        full.task,
        TaskSpec {
            limit: Some(Bytes::gib(60)),
            ..plain.task
        }
    );
    assert_eq!(full.event_log.max_bytes, plain.event_log.max_bytes);
}

#[test]
fn mistakes_are_named_with_their_place() {
    let error = parse("[policy]\nmin_turn = \"1s\"\nmax_turn = \"2s\"\n")
        .unwrap_err()
        .to_string();
    assert!(error.contains("line 3") && error.contains("max_turn"), "{error}");
    let error = parse("[arena]\nbudget = \"12Qi\"\n").unwrap_err().to_string();
    assert!(error.contains("line 2") && error.contains("Qi"), "{error}");
    let error = parse("[policy]\nidle_after = \"soon\"\n")
        .unwrap_err()
        .to_string();
    assert!(error.contains("250ms"), "{error}");
    assert!(
        parse("socket_dir = \"run\"")
            .unwrap_err()
            .to_string()
            .contains("absolute")
    );
    assert!(parse("[arena]\nsegment = \"3000000\"").is_err());
    assert!(parse("[task]\nrequest = \"2Gi\"\nlimit = \"1Gi\"").is_err());
    assert!(parse("[policy]\nalloc_wait = \"2h\"").is_err());
    assert!(parse("log = \"loud\"").is_err());
}

#[test]
fn folders_follow_the_scope() {
    let user = parse("").unwrap();
    assert_eq!(user.socket_dir, Path::new("/tmp/ebb-7"));
    assert_eq!(user.state_dir, Path::new("/home/u/.local/state/ebb"));
    assert_eq!(user.idle_exit, Some(Duration::from_secs(600)));
    let system = parse("scope = \"system\"").unwrap();
    assert_eq!(system.socket_dir, Path::new("/run/ebb"));
    assert_eq!(system.state_dir, Path::new("/var/lib/ebb"));
    assert_eq!(system.idle_exit, None);
    let homeless = Config::parse(
        "",
        Path::new("x"),
        &Surroundings {
            home: None,
            ..around()
        },
    )
    .unwrap();
    assert_eq!(homeless.state_dir, Path::new("/tmp/ebb-7/state"));
}

#[test]
fn the_environment_goes_before_the_file() {
    let around = Surroundings {
        nvml: Some("off".into()),
        log: Some("debug".into()),
        ..around()
    };
    let config = Config::parse("log = \"error\"\nnvml = \"/x.so\"", Path::new("x"), &around).unwrap();
    assert_eq!((config.nvml, config.log), (None, Some(Level::Debug)));
}

#[test]
fn an_arena_above_the_memory_or_the_cgroup_is_refused_with_the_numbers() {
    let mut memory = HostMemory {
        total: Bytes::gib(64),
        available: Bytes::gib(40),
        cgroup: None,
    };
    let big = parse("[arena]\nbudget = \"65Gi\"").unwrap();
    let error = big.arena_budget(&memory).unwrap_err();
    assert!(
        error.to_string().contains("65 GiB") && error.to_string().contains("64 GiB"),
        "{error}"
    );
    assert!(error.fix().contains("36Gi"), "{}", error.fix());
    memory.cgroup = Some(CgroupMemory {
        limit: Bytes::gib(8),
        used: Bytes::gib(1),
    });
    let ten = parse("[arena]\nbudget = \"10Gi\"").unwrap();
    let error = ten.arena_budget(&memory).unwrap_err().to_string();
    assert!(error.contains("10 GiB") && error.contains("8 GiB"), "{error}");
    let five = parse("[arena]\nbudget = \"5Gi\"").unwrap();
    assert_eq!(five.arena_budget(&memory).unwrap(), Bytes::gib(5));
    assert_eq!(
        parse("").unwrap().arena_budget(&memory).unwrap(),
        Bytes(memory.cgroup.unwrap().left().0 / 5 * 4).round_down(GRANULE)
    );
}

#[test]
fn rules_are_read_and_a_wrong_one_is_refused_with_its_place() {
    let config = parse(
        "[[rule]]\nname = \"full\"\nwhen = \"device.used > 92% for 30s\"\ndo = [\"trim\", \"shrink low\", \"notify\"]\n\
         [notify]\ncommand = \"logger\"\n[tenants]\n1000 = 3\n",
    )
    .unwrap();
    assert_eq!(config.rules.len(), 1);
    assert_eq!(config.rules[0].deeds.len(), 3);
    assert_eq!(config.tenants, BTreeMap::from([(1000, 3)]));
    let wrong = |text: &str| parse(text).unwrap_err().to_string();
    let error = wrong("[[rule]]\nname = \"x\"\nwhen = \"device.usd > 92%\"\ndo = [\"trim\"]\n");
    assert!(
        error.contains("line 3, column 8") && error.contains("device.usd"),
        "{error}"
    );
    let error = wrong("[[rule]]\nname = \"x\"\nwhen = \"device.used > 92%\"\ndo = [\"trim\", \"explode\"]\n");
    assert!(
        error.contains("line 4, column 6") && error.contains("explode"),
        "{error}"
    );
    let error = wrong("[notify]\nwebhook = \"https://x/\"\n");
    assert!(error.contains("line 2, column 11"), "{error}");
    assert!(parse("[tenants]\nalice = 2\n").is_err());
    assert!(parse("[tenants]\n1 = 0\n").is_err());
}

#[test]
fn durations() {
    assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
    assert_eq!(parse_duration("10m"), Ok(Duration::from_secs(600)));
    for bad in [
        "",
        "5",
        "s",
        "-1s",
        "1.5s",
        "99999999999999999999s",
        "18446744073709551615h",
    ] {
        assert!(parse_duration(bad).is_err(), "{bad}");
    }
}
