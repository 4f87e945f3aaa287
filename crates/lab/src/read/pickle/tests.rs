//! Pickles as Python writes them, as it would not, and hostile ones.

use proptest::prelude::*;

use super::*;

fn read(bytes: &[u8]) -> Result<Pickle, PickleError> {
    let limits = Limits {
        memory: 1 << 20,
        depth: 8,
    };
    Pickle::read(&mut &*bytes, limits, &["frames"])
}

/// Written as Python would.
fn show(pickle: &Pickle, node: Node, depth: u32) -> String {
    if depth == 0 {
        return "…".into();
    }
    let each =
        |nodes: &[Node]| -> Vec<String> { nodes.iter().map(|&node| show(pickle, node, depth - 1)).collect() };
    match pickle.value(node) {
        Value::None => "None".into(),
        Value::Bool(value) => format!("{value}"),
        Value::Int(value) => format!("{value}"),
        Value::Unsigned(value) => format!("{value}u"),
        Value::Huge => "huge".into(),
        Value::Float(value) => format!("{value:?}"),
        Value::Text(text) => format!("{:?}", pickle.text(text)),
        Value::Bytes => "bytes".into(),
        Value::List(items) => format!("[{}]", each(items).join(" ")),
        Value::Dict(items) => {
            let items = items.iter().map(|&(key, value)| each(&[key, value]).join(":"));
            format!("{{{}}}", items.collect::<Vec<_>>().join(" "))
        }
    }
}

fn shown(bytes: &[u8]) -> String {
    let pickle = read(bytes).unwrap_or_else(|error| panic!("{error} at {}", error.offset));
    show(&pickle, pickle.root(), 5)
}

fn fault(bytes: &[u8]) -> String {
    let error = read(bytes).unwrap_err();
    format!("{}: {error}", error.offset)
}

#[test]
fn plain_data_of_every_version() {
    // {'a': [1, -2, 3.5, None, True], 'b': (300, 'x')} as Python's pickle.dumps writes it, versions 0, 2 and 4.
    let expected = "{\"a\":[1 -2 3.5 None true] \"b\":[300 \"x\"]}";
    let v0 = b"(dp0\nVa\np1\n(lp2\nI1\naI-2\naF3.5\naNaI01\nasVb\np3\n(I300\nVx\np4\ntp5\ns.";
    let v2 = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffG@\x0c\x00\x00\x00\x00\x00\x00N\x88e\
            X\x01\x00\x00\x00bq\x03M,\x01X\x01\x00\x00\x00xq\x04\x86q\x05u.";
    let v4 = b"\x80\x04\x95-\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01J\xfe\xff\xff\xffG@\x0c\x00\x00\x00\x00\x00\
            \x00N\x88e\x8c\x01b\x94M,\x01\x8c\x01x\x94\x86\x94u.";
    for bytes in [&v0[..], v2, v4] {
        assert_eq!(shown(bytes), expected);
    }
}

#[test]
fn numbers_of_every_width() {
    assert_eq!(
        shown(b"(\x8a\x00\x8a\x01\xff\x8a\x02\x00\x80\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7ft."),
        "[0 -1 -32768 9223372036854775807]"
    );
    // Addresses with the highest bit set need nine bytes.
    assert_eq!(
        shown(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00."),
        "9223372036854775808u"
    );
    assert_eq!(shown(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01."), "huge");
    assert_eq!(
        shown(b"\x8b\x20\x00\x00\x00aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa."),
        "huge"
    );
    assert_eq!(
        shown(b"L99999999999999999999999999999999999999999999L\n."),
        "huge"
    );
    assert_eq!(
        shown(b"(C\x02abB\x01\x00\x00\x00a\x8e\x01\x00\x00\x00\x00\x00\x00\x00a\x8f(K\x01\x90)t."),
        "[bytes bytes bytes [1] []]"
    );
}

#[test]
fn what_is_to_be_forgotten_is() {
    assert_eq!(
        shown(b"\x80\x04}(\x8c\x06frames\x94](K\x01K\x02eK\x07K\x08u."),
        "{\"frames\":None 7:8}"
    );
}

#[test]
fn nothing_of_python_comes_to_life() {
    // os.system('true'), in the ways that versions 0, 2 and 4 have for it.
    let cases: [(&[u8], &str); 9] = [
        (b"cos\nsystem\n(S'true'\ntR.", "0: GLOBAL refused"),
        (
            b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.",
            "2: GLOBAL refused",
        ),
        (
            b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
            "17: STACK_GLOBAL refused",
        ),
        (b"(S'true'\nios\nsystem\n.", "9: INST refused"),
        (b"}K\x01R.", "3: REDUCE refused"),
        (b"}}b.", "2: BUILD refused"),
        (b"))\x81.", "2: NEWOBJ refused"),
        (b"\x82\x01.", "0: EXT1 refused"),
        (b"Pid\n.", "0: PERSID refused"),
    ];
    for (bytes, expected) in cases {
        let fault = fault(bytes);
        assert!(fault.starts_with(expected), "{fault}");
    }
}

#[test]
fn what_is_not_well_formed_is_said_with_its_place() {
    let cases: [(&[u8], &str); 16] = [
        (b"", "0: the file ends before the pickle does"),
        (b"K", "0: the file ends before the pickle does"),
        (b".", "0: STOP finds nothing to work on"),
        (b"(.", "1: STOP finds nothing to work on"),
        (b"K\x01e.", "2: APPENDS finds nothing to work on"),
        (b"K\x01K\x02a.", "4: APPEND finds a value of another kind"),
        (b"](K\x01u.", "4: a key without its value"),
        (b"](K\x01K\x02u.", "6: SETITEMS finds a value of another kind"),
        (b"K\x01(\x85.", "3: TUPLE finds nothing to work on"),
        (b"h\x05.", "0: value 5 was never noted"),
        (b"I1x\n.", "0: found no whole number"),
        (b"\x8c\x01\xff.", "0: found no text in UTF-8"),
        (b"\xff.", "0: 0xff is no operation of a pickle"),
        (
            b"\x80\x06.",
            "0: version 6 of the format; 5 is the newest that is known",
        ),
        (b"(((((((((", "8: more than 8 lists or dicts inside each other"),
        (b"Sx\n.", "0: found no quoted text"),
    ];
    for (bytes, expected) in cases {
        assert_eq!(fault(bytes), expected);
    }
}

#[test]
fn bombs_cost_what_they_weigh_at_most() {
    let memory = "it needs more than 1048576 bytes of memory";
    // Lengths and numbers without anything behind them.
    assert_eq!(
        fault(b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f."),
        format!("0: {memory}")
    );
    // Found by the fuzzer: such a number took as many entries, up to the limit of 8 GiB, for five bytes of the file.
    for (note, recall) in [
        (&b"r\xff\xff\xff\xff"[..], &b"j\xff\xff\xff\xff"[..]),
        (b"p18446744073709551615\n", b"g18446744073709551615\n"),
    ] {
        let text = [b"N", note, b"0", recall, b"."].concat();
        assert_eq!(shown(&text), "None", "{text:?}");
    }
    // Numbers out of order, each of which is noted once more.
    assert_eq!(
        shown(b"(K\x01q\x02K\x02q\x00K\x03q\x01K\x04q\x02h\x00h\x01h\x02l."),
        "[1 2 3 4 2 3 4]"
    );
    assert_eq!(
        fault(b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff."),
        "0: the file ends before the pickle does"
    );
    // Lists that hold the one before ten times: a tree of ten to the hundredth leaves, in little memory.
    let mut laughs = b"]\x94".to_vec();
    for level in 0..100u8 {
        laughs.push(b'(');
        for _ in 0..10 {
            laughs.extend([b'h', level]);
        }
        laughs.extend(b"l\x94");
    }
    laughs.push(b'.');
    let pickle = read(&laughs).unwrap();
    assert!(matches!(pickle.value(pickle.root()), Value::List(items) if items.len() == 10));
    // A list in itself.
    assert_eq!(shown(b"]\x94h\x00a."), "[[[[[…]]]]]");
    // A stack that never ends, and a list.
    assert!(fault(&vec![b'N'; 1 << 20]).ends_with(memory));
    assert!(fault(&b"]".repeat(1 << 20)).ends_with(memory));
}

proptest! {
    #[test]
    fn no_bytes_do_harm(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = read(&bytes);
    }

    #[test]
    fn no_operations_do_harm(codes in prop::collection::vec(prop::sample::select(&b"((]}NK\x01K\x02aeust)ldh\x00\x940122\x85\x86\x87"[..]), 0..400)) {
        let mut bytes = codes;
        bytes.push(b'.');
        if let Ok(pickle) = read(&bytes) {
            show(&pickle, pickle.root(), 4);
        }
    }
}
