"""Training loops of the kind that keras.io's and TensorFlow's tutorials teach, for one device.

Goes in: a Keras, Keras 3 or tf_keras.  Comes out: ``TUTORIALS``, each of which makes the step of a
loop, what holds its state, and a function that draws a batch of so many rows.
"""

import numpy as np
import tensorflow as tf

TUTORIALS = {}


def tutorial(make):
    """Registers a function that makes a step, what holds its state, and batches, from a Keras."""
    TUTORIALS[make.__name__] = make
    return make


def images(draw, rows):
    return draw.normal(size=[rows, 8, 8, 1])


def classified(draw, rows):
    return draw.normal(size=[rows, 6]), draw.integers(0, 3, size=[rows])


def updated(optimizer, tape, loss, model):
    """Gradient descent as the tutorials write it."""
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return gradients


@tutorial
def training_from_scratch(kit):
    """keras.io: metric objects in the loop, losses that layers add, a scheduled rate."""
    model = kit.Sequential([
        kit.Input([6]), kit.layers.Dense(7, "relu", activity_regularizer="l2"),
        kit.layers.Dropout(0.3, seed=5), kit.layers.Dense(3, kernel_regularizer="l2")])
    optimizer = kit.optimizers.RMSprop(kit.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9))
    loss_of = kit.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [kit.metrics.SparseCategoricalAccuracy(), kit.metrics.Mean()]

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_of(y, logits) + sum(model.losses)
        updated(optimizer, tape, loss, model)
        metrics[0].update_state(y, logits)
        metrics[1].update_state(loss)
        return loss, [metric.result() for metric in metrics]

    return step, [model, *metrics], classified


def generator_of(kit, noise):
    layers = kit.layers
    return kit.Sequential([
        kit.Input([noise]), layers.Dense(2 * 2 * 4, use_bias=False), layers.BatchNormalization(),
        layers.LeakyReLU(), layers.Reshape([2, 2, 4]),
        layers.Conv2DTranspose(3, 3, 2, padding="same", use_bias=False),
        layers.BatchNormalization(), layers.LeakyReLU(),
        layers.Conv2DTranspose(1, 3, 2, padding="same", activation="tanh")])


def discriminator_of(kit):
    layers = kit.layers
    return kit.Sequential([
        kit.Input([8, 8, 1]), layers.Conv2D(3, 3, 2, padding="same"), layers.LeakyReLU(),
        layers.Dropout(0.3, seed=3), layers.Flatten(), layers.Dense(1)])


@tutorial
def dcgan(kit):
    """Two models, two tapes, noise of a fixed number of rows."""
    generator, discriminator = generator_of(kit, 5), discriminator_of(kit)
    optimizers = [kit.optimizers.Adam(1e-3) for _ in range(2)]
    cross_entropy = kit.losses.BinaryCrossentropy(from_logits=True)

    def step(real):
        noise = tf.random.normal([6, 5], dtype=tf.float64)
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_discriminator:
            fake = generator(noise, training=True)
            seen, forged = discriminator(real, training=True), discriminator(fake, training=True)
            fooled = cross_entropy(tf.ones_like(forged), forged)
            caught = (cross_entropy(tf.ones_like(seen), seen)
                      + cross_entropy(tf.zeros_like(forged), forged))
        updated(optimizers[0], of_generator, fooled, generator)
        updated(optimizers[1], of_discriminator, caught, discriminator)
        return fooled, caught

    return step, [generator, discriminator], lambda draw, rows: (images(draw, rows),)


@tutorial
def wgan_gp(kit):
    """keras.io: a critic that is trained several times a step, a penalty on its gradients."""
    generator = generator_of(kit, 5)
    critic = kit.Sequential([kit.Input([8, 8, 1]), kit.layers.Conv2D(3, 3, 2, activation="tanh"),
                             kit.layers.Flatten(), kit.layers.Dense(1)])
    optimizers = [kit.optimizers.Adam(1e-3, beta_1=0.5) for _ in range(2)]

    def step(real):
        rows = tf.shape(real)[0]
        for _ in range(2):
            noise = tf.random.normal([rows, 5], dtype=tf.float64)
            with tf.GradientTape() as tape:
                fake = generator(noise, training=True)
                cost = tf.reduce_mean(critic(fake, training=True)) - tf.reduce_mean(
                    critic(real, training=True))
                between = real + tf.random.uniform([rows, 1, 1, 1], dtype=tf.float64) * (
                    fake - real)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    judged = critic(between, training=True)
                slopes = inner.gradient(judged, between)
                norms = tf.sqrt(tf.reduce_sum(tf.square(slopes), axis=[1, 2, 3]))
                cost += 10 * tf.reduce_mean((norms - 1) ** 2)
            updated(optimizers[0], tape, cost, critic)
        with tf.GradientTape() as tape:
            made = generator(tf.random.normal([rows, 5], dtype=tf.float64), training=True)
            loss = -tf.reduce_mean(critic(made, training=True))
        updated(optimizers[1], tape, loss, generator)
        return cost, loss

    return step, [generator, critic], lambda draw, rows: (images(draw, rows),)


def translator_of(kit):
    """An image to an image: two levels down and up, with a skip connection."""
    layers = kit.layers
    given = kit.Input([8, 8, 1])
    down = layers.LeakyReLU()(layers.Conv2D(3, 4, 2, padding="same")(given))
    deep = layers.Conv2D(4, 4, 2, padding="same", use_bias=False)(down)
    deep = layers.LeakyReLU()(layers.BatchNormalization()(deep))
    up = layers.Conv2DTranspose(3, 4, 2, padding="same", use_bias=False)(deep)
    up = layers.ReLU()(layers.Dropout(0.5, seed=9)(layers.BatchNormalization()(up)))
    made = layers.Conv2DTranspose(1, 4, 2, padding="same", activation="tanh")(
        layers.Concatenate()([up, down]))
    return kit.Model(given, made)


@tutorial
def cycle_gan(kit):
    """Four models, four optimizers, one persistent tape."""
    there, back = translator_of(kit), translator_of(kit)
    judges = [discriminator_of(kit), discriminator_of(kit)]
    optimizers = [kit.optimizers.Adam(2e-4, beta_1=0.5) for _ in range(4)]
    cross_entropy = kit.losses.BinaryCrossentropy(from_logits=True)

    def step(one, other):
        with tf.GradientTape(persistent=True) as tape:
            fake_other, fake_one = there(one, training=True), back(other, training=True)
            cycled_one = back(fake_other, training=True)
            cycled_other = there(fake_one, training=True)
            same_one, same_other = back(one, training=True), there(other, training=True)
            judged = [judge(real, training=True) for judge, real in zip(judges, (one, other))]
            forged = [judge(fake, training=True)
                      for judge, fake in zip(judges, (fake_one, fake_other))]
            cycle = 10 * (tf.reduce_mean(tf.abs(one - cycled_one))
                          + tf.reduce_mean(tf.abs(other - cycled_other)))
            of_there = (cross_entropy(tf.ones_like(forged[1]), forged[1]) + cycle
                        + 5 * tf.reduce_mean(tf.abs(other - same_other)))
            of_back = (cross_entropy(tf.ones_like(forged[0]), forged[0]) + cycle
                       + 5 * tf.reduce_mean(tf.abs(one - same_one)))
            of_judges = [(cross_entropy(tf.ones_like(real), real)
                          + cross_entropy(tf.zeros_like(fake), fake)) / 2
                         for real, fake in zip(judged, forged)]
        losses = [of_there, of_back, *of_judges]
        for optimizer, loss, model in zip(optimizers, losses, [there, back, *judges]):
            updated(optimizer, tape, loss, model)
        return losses

    return step, [there, back, *judges], lambda draw, rows: (images(draw, rows),
                                                             images(draw, rows))


@tutorial
def translation(kit):
    """A transformer: masked labels, causal attention, a schedule of one's own."""
    layers, width, words = kit.layers, 8, 11
    angles = np.arange(12)[:, None] / 100 ** (np.arange(width) / width)
    places = tf.constant(np.where(np.arange(width) % 2, np.cos(angles), np.sin(angles)))

    class Attended(layers.Layer):
        """An attention to itself or to the encoder, and a feed-forward network."""

        def __init__(self, causal):
            super().__init__()
            self.causal = causal
            self.attention = layers.MultiHeadAttention(2, 4)
            self.forward = kit.Sequential([layers.Dense(9, "relu"), layers.Dense(width),
                                           layers.Dropout(0.1, seed=8)])
            self.norms = [layers.LayerNormalization() for _ in range(2)]

        def call(self, x, context, training=None):
            seen = self.attention(query=x, key=context, value=context,
                                  use_causal_mask=self.causal, training=training)
            x = self.norms[0](x + seen)
            return self.norms[1](x + self.forward(x, training=training))

    class Translator(kit.Model):
        def __init__(self):
            super().__init__()
            self.tables = [layers.Embedding(words, width) for _ in range(2)]
            self.blocks = [Attended(False), Attended(True), Attended(False)]
            self.last = layers.Dense(words)

        def embedded(self, tokens, table):
            x = table(tokens) * width ** 0.5
            return x + places[None, :tf.shape(tokens)[1]]

        def call(self, pair, training=None):
            context, x = (self.embedded(*both) for both in zip(pair, self.tables))
            context = self.blocks[0](context, context, training=training)
            x = self.blocks[1](x, x, training=training)
            return self.last(self.blocks[2](x, context, training=training))

    class Warmup(kit.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            step = tf.cast(step, tf.float64)
            return 0.3 * tf.math.minimum(tf.math.rsqrt(step + 1), (step + 1) / 8)

        def get_config(self):
            return {}

    model = Translator()
    optimizer = kit.optimizers.Adam(Warmup(), beta_1=0.9, beta_2=0.98, epsilon=1e-9)
    loss_object = kit.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    accuracy = kit.metrics.Mean()

    def step(given, target):
        told, wanted = target[:, :-1], target[:, 1:]
        with tf.GradientTape() as tape:
            logits = model((given, told), training=True)
            mask = tf.cast(wanted != 0, tf.float64)
            loss = tf.reduce_sum(loss_object(wanted, logits) * mask) / tf.reduce_sum(mask)
        updated(optimizer, tape, loss, model)
        right = tf.cast(tf.argmax(logits, 2) == wanted, tf.float64)
        accuracy.update_state(tf.reduce_sum(right * mask) / tf.reduce_sum(mask))
        return loss, accuracy.result()

    def batch(draw, rows):
        lengths = draw.integers(2, 8, size=[rows, 1])
        tokens = draw.integers(1, words, size=[2, rows, 7])
        return tuple(tokens * (np.arange(7) < lengths))

    return step, [model, accuracy], batch


def network(kit, *sizes):
    return kit.Sequential([kit.Input([4]), *[kit.layers.Dense(size, "tanh") for size in sizes[:-1]],
                           kit.layers.Dense(sizes[-1])])


@tutorial
def dqn(kit):
    """A target network that is copied every other step, the values of the actions taken."""
    online, target = network(kit, 8, 3), network(kit, 8, 3)
    optimizer = kit.optimizers.Adam(0.01, clipnorm=1.0)
    huber = kit.losses.Huber()
    count = tf.Variable(0, dtype=tf.int64)

    def step(state, action, reward, following, done):
        future = tf.reduce_max(target(following), axis=1)
        goal = reward + 0.9 * future * (1 - done)
        with tf.GradientTape() as tape:
            values = online(state)
            taken = tf.gather(values, action, batch_dims=1)
            loss = huber(goal, tf.reduce_sum(values * tf.one_hot(action, 3, dtype=tf.float64), 1))
            loss += 0.1 * tf.reduce_mean((goal - taken) ** 2)
        updated(optimizer, tape, loss, online)
        if count.assign_add(1) % 2 == 0:
            for old, new in zip(target.variables, online.variables):
                old.assign(new)
        return loss, tf.reduce_max(tf.abs(goal - taken))

    def batch(draw, rows):
        return (draw.normal(size=[rows, 4]), draw.integers(0, 3, size=[rows]),
                draw.normal(size=[rows]), draw.normal(size=[rows, 4]),
                draw.integers(0, 2, size=[rows]).astype("float64"))

    return step, [online, target, count], batch


@tutorial
def actor_critic(kit):
    """Episodes in a loop within the step, their returns summed up backwards and standardized."""
    body, actor, critic = network(kit, 8), network(kit, 3), network(kit, 1)
    body, actor, critic = (kit.Sequential([kit.Input([size]), kit.layers.Dense(units)])
                           for size, units in ((4, 8), (8, 3), (8, 1)))
    optimizer = kit.optimizers.Adam(0.01)
    huber = kit.losses.Huber(reduction="sum")
    parts = [body, actor, critic]

    def episode(state):
        taken, values, rewards = (tf.TensorArray(tf.float64, 0, dynamic_size=True)
                                  for _ in range(3))
        for turn in tf.range(5):
            hidden = tf.tanh(body(state))
            logits, value = actor(hidden), critic(hidden)
            action = tf.argmax(logits, 1)
            chosen = tf.gather(tf.nn.softmax(logits), action, batch_dims=1)
            taken = taken.write(turn, chosen)
            values = values.write(turn, tf.squeeze(value, 1))
            state = 0.9 * state + 0.1 * tf.cast(action - 1, tf.float64)[:, None]
            rewards = rewards.write(turn, 1 - tf.reduce_sum(state ** 2, 1))
        return taken.stack(), values.stack(), rewards.stack()

    def returns_of(rewards):
        total = tf.zeros_like(rewards[0])
        found = tf.TensorArray(tf.float64, 5)
        backwards = rewards[::-1]
        for turn in tf.range(5):
            total = backwards[turn] + 0.9 * total
            found = found.write(turn, total)
        found = found.stack()[::-1]
        return (found - tf.reduce_mean(found)) / (tf.math.reduce_std(found) + 1e-6)

    def step(state):
        with tf.GradientTape() as tape:
            taken, values, rewards = episode(state)
            returns = returns_of(rewards)
            advantage = tf.stop_gradient(returns - values)
            loss = huber(returns, values) - tf.reduce_sum(tf.math.log(taken) * advantage)
        variables = [variable for part in parts for variable in part.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss, tf.reduce_sum(rewards)

    return step, parts, lambda draw, rows: (draw.normal(size=[rows, 4]),)
