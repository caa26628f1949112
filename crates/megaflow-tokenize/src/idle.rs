//! Encoders between two batches: their word caches stay warm for the next one.

use std::sync::Mutex;
use std::thread;

use crate::{EncodeOptions, EngineEncoder};

/// Encoders that nobody uses at the moment, each with the options it was made for.
///
/// Nobody ever waits for the lock: where it is taken (in a forked child it may stay so for good), an encoder is made anew or
/// dropped, which costs time and changes no id.
#[derive(Default)]
pub(crate) struct IdleEncoders {
    encoders: Mutex<Vec<(EncodeOptions, Box<dyn EngineEncoder>)>>,
}

impl IdleEncoders {
    /// The encoder for these options that was used last, if there is one.
    pub(crate) fn take(&self, options: EncodeOptions) -> Option<Box<dyn EngineEncoder>> {
        let mut encoders = self.encoders.try_lock().ok()?;
        let place = encoders.iter().rposition(|(made_for, _)| *made_for == options)?;
        Some(encoders.remove(place).1)
    }

    /// Keeps an encoder for later; beyond one for each processor, the one that has waited longest goes.
    pub(crate) fn put(&self, options: EncodeOptions, encoder: Box<dyn EngineEncoder>) {
        let most = thread::available_parallelism().map_or(1, usize::from);
        // What goes is dropped after the lock: clearing a cache takes a while.
        let _gone = self.encoders.try_lock().ok().and_then(|mut encoders| {
            encoders.push((options, encoder));
            (encoders.len() > most).then(|| encoders.remove(0))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TokenizeError, Tokenizer};

    /// Says of itself which one it is.
    struct Numbered(u32);

    impl EngineEncoder for Numbered {
        fn encode(&mut self, _: &str, out: &mut Vec<u32>) -> Result<(), TokenizeError> {
            out.push(self.0);
            Ok(())
        }

        fn encode_u16(&mut self, _: &str, _: &mut Vec<u16>) -> Result<(), TokenizeError> {
            unreachable!("not asked for")
        }
    }

    fn number(encoder: Option<Box<dyn EngineEncoder>>) -> Option<u32> {
        let mut ids = Vec::new();
        encoder?.encode("", &mut ids).unwrap();
        ids.pop()
    }

    #[test]
    fn the_last_one_used_with_the_same_options_comes_back_and_only_once() {
        let idle = IdleEncoders::default();
        let options = EncodeOptions::default();
        let other = EncodeOptions { cache_bytes: 1 << 20, ..options };
        idle.put(options, Box::new(Numbered(1)));
        assert_eq!(number(idle.take(other)), None);
        assert_eq!(number(idle.take(options)), Some(1));
        assert_eq!(number(idle.take(options)), None);
    }

    #[test]
    fn no_more_are_kept_than_there_are_processors() {
        let (idle, most) = (IdleEncoders::default(), thread::available_parallelism().unwrap().get() as u32);
        for number in 0..=most {
            idle.put(EncodeOptions::default(), Box::new(Numbered(number)));
        }
        let kept: Vec<u32> = std::iter::from_fn(|| number(idle.take(EncodeOptions::default()))).collect();
        assert_eq!(kept, (1..=most).rev().collect::<Vec<_>>());
    }

    #[test]
    fn a_lock_that_is_taken_for_good_costs_a_new_encoder_only() {
        let idle = IdleEncoders::default();
        let _for_good = idle.encoders.lock().unwrap();
        idle.put(EncodeOptions::default(), Box::new(Numbered(1)));
        assert_eq!(number(idle.take(EncodeOptions::default())), None);
    }

    #[test]
    fn a_batch_after_a_batch_has_the_same_ids() {
        let json = r#"{"added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": {"type": "WordLevel",
            "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}}"#;
        let tokenizer = Tokenizer::from_tokenizer_json(json.as_bytes()).unwrap();
        let first = tokenizer.encode_batch(&["a b"], EncodeOptions::default(), 1).unwrap();
        let again = tokenizer.encode_batch(&["a b"], EncodeOptions::default(), 1).unwrap();
        assert_eq!((first.ids.as_slice(), &first), ([0, 1].as_slice(), &again));
    }
}
