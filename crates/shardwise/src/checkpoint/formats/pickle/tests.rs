//! Valid pickles, damaged ones and malicious ones.

use std::collections::BTreeMap;

use super::*;

fn value_of(bytes: &[u8]) -> Result<Value> {
    let pickle = Pickle::read(bytes)?;
    pickle.value(pickle.root(), MAX_DEPTH, &mut pickle.budget())
}

fn written(value: &Value) -> Vec<u8> {
    let mut writer = PickleWriter::new();
    writer.value(value);
    writer.finish()
}

fn some_values() -> Vec<Value> {
    let list = vec![Value::Int(1), Value::Text("naïve \"x\"\n".into()), Value::Tuple(vec![Value::None])];
    let map =
        BTreeMap::from([("a".to_string(), Value::List(list.clone())), (String::new(), Value::Map(BTreeMap::new()))]);
    let mut values =
        vec![Value::None, Value::Bool(true), Value::Bool(false), Value::List(vec![]), Value::Tuple(vec![])];
    values.extend([0, 1, -1, 255, 256, 65535, 65536, i64::from(i32::MIN), i64::MAX, i64::MIN].map(Value::Int));
    values.extend([0.0, -0.5, f64::INFINITY, 5e-324].map(Value::Float));
    values.extend([Value::Tuple(list.clone()), Value::List(list), Value::Map(map)]);
    values
}

#[test]
fn values_round_trip() {
    for value in some_values() {
        assert_eq!(value_of(&written(&value)).unwrap(), value);
    }
}

#[test]
fn old_and_new_protocols_are_read() {
    let expected = Value::List(vec![Value::Int(7), Value::Bool(true), Value::Float(0.5), Value::Text("x".into())]);
    assert_eq!(value_of(b"(lp0\nI7\naI01\naF0.5\naVx\np1\na.").unwrap(), expected);
    let four = b"\x80\x04\x95\x15\0\0\0\0\0\0\0]\x94(K\x07\x88G\x3f\xe0\0\0\0\0\0\0\x8c\x01x\x94e.";
    assert_eq!(value_of(four).unwrap(), expected);
    assert_eq!(value_of(b"L-12L\n.").unwrap(), Value::Int(-12));
    let ordered = b"\x80\x02ccollections\nOrderedDict\n)R(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u}(X\x01\0\0\0bNub.";
    assert_eq!(value_of(ordered).unwrap(), Value::Map(BTreeMap::from([("a".into(), Value::Int(2))])));
    assert!(value_of(b"\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\x01.").unwrap_err().to_string().contains("beyond 64 bits"));
}

#[test]
fn only_allowed_names_are_accepted_and_errors_name_the_others() {
    let hostile: [&[u8]; 5] = [
        b"cos\nsystem\n(X\x02\0\0\0lstR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x02c__builtin__\nexec\n.",
        b"\x80\x02ctorch\nload\n.",
        b"\x80\x02ctorch._utils\nStorage\n.",
    ];
    for (bytes, name) in
        hostile.iter().zip(["os.system", "builtins.eval", "__builtin__.exec", "torch.load", "torch._u"])
    {
        let error = Pickle::read(bytes).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains("nothing was executed"), "{error}");
    }
    for instruction in [b'i', b'o', 0x82, 0x83, 0x84, 0x92, 0x97, 0x98] {
        assert!(Pickle::read(&[0x80, 2, b'(', instruction, b'.']).is_err());
    }
}

#[test]
fn recursive_and_shared_lists_are_bounded() {
    assert!(value_of(b"]q\0h\0a.").unwrap_err().to_string().contains("nested without end"));
    assert!(value_of(b"}q\0X\x01\0\0\0ah\0s.").is_err());
    // Each list contains the one before it ten times: 10^50 entries if expanded.
    let mut bomb = b"]q\0".to_vec();
    for level in 0..50 {
        bomb.extend_from_slice(b"](");
        (0..10).for_each(|_| bomb.extend_from_slice(&[b'h', level]));
        bomb.extend_from_slice(&[b'e', b'q', level + 1]);
    }
    bomb.push(b'.');
    assert!(value_of(&bomb).is_err());
    // A long string that is referenced many times.
    let mut bomb = b"](".to_vec();
    bomb.push(b'X');
    bomb.extend_from_slice(&100_000u32.to_le_bytes());
    bomb.resize(bomb.len() + 100_000, b'x');
    bomb.extend_from_slice(b"q\0");
    (0..100_000).for_each(|_| bomb.extend_from_slice(b"h\0"));
    bomb.extend_from_slice(b"e.");
    assert!(value_of(&bomb).is_err());
    // Deep nesting, without recursion while reading and dropping.
    let mut deep = vec![b'N'; 1];
    deep.resize(2_000_000, 0x85);
    deep.push(b'.');
    assert!(value_of(&deep).is_err());
}

#[test]
fn lengths_beyond_the_input_are_refused() {
    for bytes in
        [&b"X\xff\xff\xff\xff"[..], b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff", b"\x8b\xff\xff\xff\x7f", b"B\0\0\0\x10a"]
    {
        assert!(Pickle::read(bytes).is_err());
    }
}

/// All short pickles, and truncated and changed real ones: any result is allowed, but no panic.
#[test]
fn no_pickle_panics() {
    for a in 0..=255u8 {
        for b in 0..=255u8 {
            let _ = value_of(&[b'(', b'K', 1, a, b, b'.']);
            let _ = value_of(&[b']', b'q', 0, a, b, b'0', b'.']);
        }
    }
    for value in some_values() {
        let bytes = written(&value);
        for length in 0..bytes.len() {
            assert!(value_of(&bytes[..length]).is_err());
        }
        for at in 0..bytes.len() {
            for byte in 0..=255 {
                let mut changed = bytes.clone();
                changed[at] = byte;
                let _ = value_of(&changed);
            }
        }
    }
}
