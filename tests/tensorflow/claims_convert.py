"""SavedModels of Keras models and loops convert, keep their tolerance, and run where there is no Castwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import graphs
import keras
import numpy as np
import pytest
import tensorflow as tf

from castwise import Policy
from castwise.cli import main
from castwise.errors import CastwiseError
from castwise.tensorflow import ConversionError, convert

RANDOM = np.random.default_rng(0)

RELOAD = """
import sys
sys.modules["castwise"] = None  # importing it is an error
import json, numpy as np, tensorflow as tf
for folder, feed in json.load(open(sys.argv[1])):
    model = tf.saved_model.load(folder)
    signature = model.signatures["serving_default"]
    given = dict(np.load(feed))
    found = signature(**{name: tf.constant(array) for name, array in given.items()})
    np.savez(folder + "/out.npz", **{name: tensor.numpy() for name, tensor in found.items()})
"""


def transformer():
    x = inputs = keras.Input((6, 16), name="x")
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 8)(x, x))
    x = x + keras.layers.Dense(16)(keras.layers.Dense(32, activation="gelu")(x))
    return keras.Model(inputs, keras.layers.Dense(4, activation="softmax")(x))


def convnet():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3), name="x"),
            keras.layers.Conv2D(8, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("silu"),
            keras.layers.MaxPooling2D(),
            keras.layers.DepthwiseConv2D(3),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )


class Loop(tf.Module):
    def __init__(self):
        self.w = tf.Variable(graphs.weights(8, 16))
        self.u = tf.Variable(graphs.weights(16, 16, scale=0.2))
        self.words = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(tf.constant([0, 1], tf.int64), tf.constant([1.0, 2.0])), 1.0
        )

    @tf.function(input_signature=[tf.TensorSpec([None, None, 8], tf.float32, name="x")])
    def serve(self, x):
        h = tf.zeros([tf.shape(x)[0], 16])
        kept = tf.TensorArray(tf.float32, size=tf.shape(x)[1], element_shape=[None, 16])
        for step in tf.range(tf.shape(x)[1]):
            h = tf.tanh(x[:, step] @ self.w + h @ self.u) * self.words.lookup(tf.constant(0, tf.int64))
            kept = kept.write(step, h)
        return {"h": tf.transpose(kept.stack(), [1, 0, 2])}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of three SavedModels, and inputs for each."""
    folder = tmp_path_factory.mktemp("saved")
    keras.utils.set_random_seed(1)
    feeds = {
        "transformer": RANDOM.standard_normal((8, 6, 16)).astype("f"),
        "convnet": RANDOM.standard_normal((8, 8, 8, 3)).astype("f"),
        "loop": RANDOM.standard_normal((8, 5, 8)).astype("f"),
    }
    transformer().export(folder / "transformer", verbose=False)
    convnet().export(folder / "convnet", verbose=False)
    loop = Loop()
    tf.saved_model.save(loop, folder / "loop", signatures=loop.serve)
    for name, x in feeds.items():
        np.savez(folder / f"{name}.npz", x=x)
    return folder


def test_models_convert_verify_and_reload_where_castwise_cannot_be_imported(saved, tmp_path, capsys):
    todo = []
    for name in ("transformer", "convnet", "loop"):
        out = tmp_path / name
        feed = saved / f"{name}.npz"
        to, tolerance = ("fp16", "2e-2") if name == "convnet" else ("bf16", "5e-2")
        command = ["convert", str(saved / name), str(out), "--to", to, "--calibrate", str(feed)]
        assert main([*command, "--tolerance", tolerance]) == 0
        assert "products low" in capsys.readouterr().out
        assert main(["verify", str(out), "--against", str(saved / name), "--calibrate", str(feed)]) == 0
        assert "kept" in capsys.readouterr().out
        record = json.loads((out / "assets.extra" / "castwise.json").read_text())
        assert record["signatures"][0]["products_low"] > 0
        todo.append([str(out), str(feed)])
    (tmp_path / "todo.json").write_text(json.dumps(todo))
    (tmp_path / "reload.py").write_text(RELOAD)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run(
        [sys.executable, tmp_path / "reload.py", tmp_path / "todo.json"], check=True, env=environment, timeout=300
    )
    for name in ("transformer", "convnet", "loop"):
        original = tf.saved_model.load(saved / name)
        signature = original.signatures["serving_default"]
        with np.load(saved / f"{name}.npz") as data, np.load(tmp_path / name / "out.npz") as found:
            wanted = signature(**{key: tf.constant(data[key]) for key in data.files})
            for key, exact in wanted.items():
                off = np.abs(found[key] - exact.numpy()).max() / max(1, np.abs(exact.numpy()).max())
                assert 0 < off <= 5e-2
    model = tf.saved_model.load(tmp_path / "loop")
    assert model.serve(tf.zeros([2, 3, 8]))["h"].shape == (2, 3, 16)  # the function itself is there too


def test_a_tolerance_that_takes_some_operations_wide_is_kept_and_one_too_small_is_refused(saved, tmp_path):
    feed = saved / "convnet.npz"
    loose = convert(saved / "convnet", tmp_path / "loose", format="fp16", calibration=feed, tolerance=1e-1)
    tight = convert(
        saved / "convnet", tmp_path / "tight", format="fp16", calibration=feed, tolerance=loose.signatures[0].error / 3
    )
    assert tight.signatures[0].products_low < loose.signatures[0].products_low
    assert tight.signatures[0].error <= loose.signatures[0].error / 3


def test_the_format_is_that_of_the_policy_and_what_is_low_already_counts_as_low(saved, tmp_path):
    policy = Policy(format="float16", devices={"cpu": {"format": "bfloat16"}})
    once = convert(saved / "loop", tmp_path / "once", policy=policy)
    assert once.format == "bfloat16"
    assert convert(saved / "loop", tmp_path / "asked", format="float16", policy=policy).format == "float16"
    again = convert(tmp_path / "once", tmp_path / "again", policy=policy)
    assert again.signatures[0].products_low == once.signatures[0].products_low > 0


class TwoSignatures(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.random.stateless_normal([16, 16], [1, 2]) / 4)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string), tf.TensorSpec([None, 16])])
    def named(self, label, x):
        return {"y": tf.nn.softmax(x @ self.w), "label": tf.strings.upper(label)}

    @tf.function(input_signature=[tf.TensorSpec([None, 16])])
    def embed(self, x):
        return {"h": tf.tanh(x @ self.w)}


def test_signatures_with_inputs_of_their_own_share_samples_and_may_have_some_for_themselves(tmp_path):
    model = TwoSignatures()
    tf.saved_model.save(model, tmp_path / "in", signatures={"named": model.named, "embed": model.embed})
    x = np.random.default_rng(0).normal(size=(4, 16)).astype("f")
    samples = [{"label": np.array([b"a"] * 4, object), "x": x}, {"x": 3 * x}]
    done = convert(tmp_path / "in", tmp_path / "out", format="bfloat16", calibration=samples)
    assert [one.products_low for one in done.signatures] == [1, 1]
    with pytest.raises(ConversionError, match="no input 'labels'"):
        convert(tmp_path / "in", tmp_path / "other", calibration={"labels": samples[0]["label"], "x": x})
    with pytest.raises(ConversionError, match="input 'label' is missing"):
        convert(tmp_path / "in", tmp_path / "other", calibration={"x": x})


def test_variables_of_tensorflow_1_are_refused_by_name(tmp_path):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 4], "x")
        y = x @ v1.get_variable("old", [4, 4], use_resource=False)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(tmp_path / "in"), {"x": x}, {"y": y})
    with pytest.raises(CastwiseError, match=r"'old'.*enable_resource_variables"):
        convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_misuse_is_refused_and_nothing_is_written(saved, tmp_path, capsys):
    with pytest.raises(ConversionError, match=r"no saved_model\.pb"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(ConversionError, match="no input 'y'"):
        convert(saved / "loop", tmp_path / "out", calibration={"y": np.zeros((1, 2, 8), "f")})
    with pytest.raises(ConversionError, match="shape"):
        convert(saved / "loop", tmp_path / "out", calibration={"x": np.zeros((1, 2, 9), "f")})
    with pytest.raises(ConversionError, match="tolerance"):
        convert(saved / "loop", tmp_path / "out", tolerance=-1.0)
    with pytest.raises(CastwiseError):
        convert(saved / "loop", tmp_path / "out", format="float8_e4m3fn")
    for options in (["--report", str(tmp_path / "report.html")], ["--target", "tensorrt"]):
        assert main(["convert", str(saved / "loop"), str(tmp_path / "out"), *options]) == 1
        assert options[0] in capsys.readouterr().err
    assert main(["verify", str(saved / "loop"), "--against", str(saved / "loop"), "--target", "tensorrt"]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "saved_model.pb").write_bytes(b"nothing of the kind")
    for folder in ("empty", "damaged"):
        assert main(["convert", str(tmp_path / folder), str(tmp_path / "out")]) == 1
        assert "saved_model.pb" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(ConversionError, match="exists"):
        convert(saved / "loop", tmp_path / "out")
