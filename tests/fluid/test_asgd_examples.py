"""The examples of the reference's ASGD page (which are the Optimizer's); only imports are changed."""
# The examples are printed as they stand, unused names, loop variables and formatting included, and
# use one name for things of several types.
# ruff: noqa: F841
# mypy: disable-error-code="assignment,attr-defined"

import numpy as np
import pytest

import psfleet.fluid as paddle

pytestmark = pytest.mark.quick


def test_asgd() -> None:
    """paddle.optimizer.ASGD."""
    inp = paddle.uniform(min=-0.1, max=0.1, shape=[10, 10], dtype="float32")
    linear = paddle.nn.Linear(10, 10)
    inp = paddle.to_tensor(inp)
    out = linear(inp)
    loss = paddle.mean(out)
    asgd = paddle.optimizer.ASGD(
        learning_rate=0.001, batch_num=10, parameters=linear.parameters(), weight_decay=0.01
    )
    out.backward()
    before = linear.weight.numpy().copy()
    asgd.step()
    asgd.clear_grad()
    assert not np.array_equal(before, linear.weight.numpy())


def test_get_lr(capsys: pytest.CaptureFixture[str]) -> None:
    """Constant, stepped in dygraph, stepped in a program."""
    # train on default dynamic graph mode
    emb = paddle.nn.Embedding(10, 3)

    ## example1: LRScheduler is not used, return the same value is all the same
    adam = paddle.optimizer.Adam(0.01, parameters=emb.parameters())
    for batch in range(10):
        input = paddle.randint(low=0, high=5, shape=[5])
        out = emb(input)
        out.backward()
        print(f"Learning rate of step{batch}: {adam.get_lr()}")  # 0.01
        adam.step()
    assert capsys.readouterr().out.count(": 0.01\n") == 10

    ## example2: StepDecay is used, return the scheduled learning rate
    scheduler = paddle.optimizer.lr.StepDecay(learning_rate=0.5, step_size=2, gamma=0.1)
    adam = paddle.optimizer.Adam(scheduler, parameters=emb.parameters())
    for batch in range(10):
        input = paddle.randint(low=0, high=5, shape=[5])
        out = emb(input)
        out.backward()
        print(f"Learning rate of step{batch}: {adam.get_lr()}")  # 0.5->0.05...
        adam.step()
        scheduler.step()
    assert capsys.readouterr().out.splitlines()[2] == "Learning rate of step2: 0.05"

    # train on static graph mode
    paddle.enable_static()
    main_prog = paddle.static.Program()
    start_prog = paddle.static.Program()
    with paddle.static.program_guard(main_prog, start_prog):
        x = paddle.static.data(name="x", shape=[None, 10])
        z = paddle.static.nn.fc(x, 100)
        loss = paddle.mean(z)
        scheduler = paddle.optimizer.lr.StepDecay(learning_rate=0.5, step_size=2, gamma=0.1)
        adam = paddle.optimizer.Adam(learning_rate=scheduler)
        adam.minimize(loss)

    exe = paddle.static.Executor()
    exe.run(start_prog)
    for batch in range(10):
        print(f"Learning rate of step{batch}: {adam.get_lr()}")  # 0.5->0.05->0.005...
        out = exe.run(main_prog, feed={"x": np.random.randn(3, 10).astype("float32")})
        scheduler.step()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith(": 0.5")
    assert float(printed[9].split()[-1]) == pytest.approx(5e-5)


def test_minimize() -> None:
    """In dygraph minimize uses the gradients that backward() has left."""
    linear = paddle.nn.Linear(10, 10)
    input = paddle.uniform(shape=[10, 10], min=-0.1, max=0.1)
    out = linear(input)
    loss = paddle.mean(out)

    beta1 = paddle.to_tensor([0.9], dtype="float32")
    beta2 = paddle.to_tensor([0.99], dtype="float32")

    adam = paddle.optimizer.Adam(
        learning_rate=0.1, parameters=linear.parameters(), weight_decay=0.01
    )
    loss.backward()
    adam.minimize(loss)
    adam.clear_grad()
    assert beta1.shape == beta2.shape == (1,)


def test_set_lr(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand."""
    linear = paddle.nn.Linear(10, 10)

    adam = paddle.optimizer.Adam(0.1, parameters=linear.parameters())

    # set learning rate manually by python float value
    lr_list = [0.2, 0.3, 0.4, 0.5, 0.6]
    for i in range(5):
        adam.set_lr(lr_list[i])
        lr = adam.get_lr()
        print(f"current lr is {lr}")
    assert capsys.readouterr().out.splitlines() == [f"current lr is {lr}" for lr in lr_list]


def test_set_lr_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    """One schedule after the other."""
    linear = paddle.nn.Linear(10, 10)

    adam = paddle.optimizer.Adam(0.1, parameters=linear.parameters())

    # set learning rate manually by class LRScheduler
    scheduler = paddle.optimizer.lr.MultiStepDecay(
        learning_rate=0.5, milestones=[2, 4, 6], gamma=0.8
    )
    adam.set_lr_scheduler(scheduler)
    lr = adam.get_lr()
    print(f"current lr is {lr}")
    #    current lr is 0.5

    # set learning rate manually by another LRScheduler
    scheduler = paddle.optimizer.lr.StepDecay(learning_rate=0.1, step_size=5, gamma=0.6)
    adam.set_lr_scheduler(scheduler)
    lr = adam.get_lr()
    print(f"current lr is {lr}")
    #    current lr is 0.1
    assert capsys.readouterr().out == "current lr is 0.5\ncurrent lr is 0.1\n"


def test_set_state_dict() -> None:
    """States of layer and optimizer through files."""
    emb = paddle.nn.Embedding(10, 10)

    layer_state_dict = emb.state_dict()
    paddle.save(layer_state_dict, "emb.pdparams")

    scheduler = paddle.optimizer.lr.NoamDecay(d_model=0.01, warmup_steps=100, verbose=True)
    adam = paddle.optimizer.Adam(learning_rate=scheduler, parameters=emb.parameters())
    opt_state_dict = adam.state_dict()
    paddle.save(opt_state_dict, "adam.pdopt")

    opti_state_dict = paddle.load("adam.pdopt")
    adam.set_state_dict(opti_state_dict)


def test_step() -> None:
    """The examples of step and of clear_grad: one update, and gradients are zero."""
    a = paddle.arange(26, dtype="float32").reshape([2, 13])
    linear = paddle.nn.Linear(13, 5)
    # This can be any optimizer supported by dygraph.
    adam = paddle.optimizer.Adam(learning_rate=0.01, parameters=linear.parameters())
    out = linear(a)
    out.backward()
    before = linear.weight.numpy().copy()
    adam.step()
    adam.clear_grad()
    np.testing.assert_allclose(before - linear.weight.numpy(), 0.01, rtol=1e-3)
    assert not np.asarray(linear.weight.grad).any()
